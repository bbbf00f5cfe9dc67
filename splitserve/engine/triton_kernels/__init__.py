"""Triton kernels of the GPU step, each with its launcher and nothing else in its file.

Every kernel has a reference in plain torch that it is held to: attention/reference.py,
attention/base.py's write_kv, models/layers.py, models/rope.py, kv_cache.py. They compute in f32,
multiply matrices in the dtype of the tensors, and round once when they store.

What a row of results is does not depend on what else is in the batch: work is cut by a row's own
length, never by the batch's, and nothing is added in an order that the batch decides.
"""
