"""Real workers with faults built around them, for tests: slow, held at a point, failing, frozen.

`python -m tests.faults.prefill` and `python -m tests.faults.decode` are the real workers. What is
wrapped around them obeys a small file (pace.py) that a test may change while the cluster runs.
"""
