"""The package's public names (barrel_inference/__init__.py)."""

import ast
import subprocess
import sys

import barrel_inference


def test_every_name_is_there() -> None:
    """`__all__` is what the package gives, and it gives all of it."""
    for name in barrel_inference.__all__:
        assert getattr(barrel_inference, name).__name__ == name
    assert set(barrel_inference.__all__) <= set(dir(barrel_inference))
    assert barrel_inference.__all__ == sorted(barrel_inference.__all__)
    assert barrel_inference.__version__


def test_import_is_free() -> None:
    """Importing the package loads neither llama.cpp nor numpy nor ZeroMQ; a client needs no llama.cpp and no numpy."""
    code = "import sys, barrel_inference; before = sorted(sys.modules); barrel_inference.Client; print((before, sorted(sys.modules)))"
    told = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True).stdout
    before, after = ast.literal_eval(told)
    assert not {"llama_cpp", "numpy", "zmq", "msgspec", "asyncio"} & set(before)
    assert not {"llama_cpp", "numpy", "rich", "typer"} & set(after)
