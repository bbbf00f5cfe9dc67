"""Kernels and the step on a real GPU. Kernels need torch, triton, numpy and pytest; the step needs
transformers, tokenizers and safetensors too; nothing else of the package's:

python -m pytest -c /dev/null --rootdir . tests/gpu

(`-c /dev/null`, because pyproject.toml asks for pytest-timeout.)
"""
