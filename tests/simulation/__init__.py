"""The whole cluster in one thread: real state machines and loops, virtual time, no sockets.

Everything that happens is an event in one queue, and every choice is drawn from one seeded
generator: a seed is a run, and a run can be had again. `python -m tests.simulation SEED` shows it.
"""
