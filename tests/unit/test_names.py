"""Names of image files say whose they are, and nothing else looks like one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from barrel_inference.tiers import names

KEY = bytes(range(32))


@given(key=st.binary(min_size=32, max_size=32), pid=st.integers(1, 2**22), token=st.integers(1, 2**63 - 1))
def test_names_come_back(key: bytes, pid: int, token: int) -> None:
    """The key, and of a temporary file its writer, are told by the name."""
    assert names.key_of(names.file_name(key)) == key
    assert names.parse(names.shard_of(key), names.temp_name(key, pid, token)) == names.Found(key, pid)


@pytest.mark.parametrize(
    ("shard", "name"),
    [
        ("00", KEY.hex()),
        ("01", f"{KEY.hex()}.kvc"),  # in another key's directory
        ("00", f"{KEY.hex().upper()}.kvc"),
        ("00", f"{KEY.hex()}.kvc.12.tmp"),
        ("00", f"{KEY.hex()}.kvc\n"),
        ("00", ".lock"),
    ],
)
def test_other_names_are_not_ours(shard: str, name: str) -> None:
    """What only looks similar is left alone."""
    assert names.parse(shard, name) is None


@pytest.mark.parametrize("name", ["", "/", "../etc/passwd", f"00/../{KEY.hex()}.kvc", f"00/{KEY.hex()}.kvc.1.1.tmp"])
def test_paths_that_lead_elsewhere_have_no_key(name: str) -> None:
    """A path that is not exactly a key's own names no file."""
    assert names.key_of(name) is None
