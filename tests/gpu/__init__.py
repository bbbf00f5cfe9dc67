"""Kernels on a real GPU. They need torch, triton, numpy and pytest, nothing else of the package's:

python -m pytest -c /dev/null --rootdir . tests/gpu

(`-c /dev/null`, because pyproject.toml asks for pytest-timeout.)
"""
