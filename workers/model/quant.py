"""Names and bits of the quantisations that a GGUF's `general.file_type` can name. Pure."""

# llama.cpp's enum llama_ftype; numbers are on disk and never change their meaning.
_TYPES: dict[int, tuple[str, int]] = {
    0: ("f32", 32), 1: ("f16", 16), 2: ("q4_0", 4), 3: ("q4_1", 4), 7: ("q8_0", 8), 8: ("q5_0", 5), 9: ("q5_1", 5),
    10: ("q2_k", 2), 11: ("q3_k_s", 3), 12: ("q3_k_m", 3), 13: ("q3_k_l", 3), 14: ("q4_k_s", 4), 15: ("q4_k_m", 4),
    16: ("q5_k_s", 5), 17: ("q5_k_m", 5), 18: ("q6_k", 6), 19: ("iq2_xxs", 2), 20: ("iq2_xs", 2), 21: ("q2_k_s", 2),
    22: ("iq3_xs", 3), 23: ("iq3_xxs", 3), 24: ("iq1_s", 1), 25: ("iq4_nl", 4), 26: ("iq3_s", 3), 27: ("iq3_m", 3),
    28: ("iq2_s", 2), 29: ("iq2_m", 2), 30: ("iq4_xs", 4), 31: ("iq1_m", 1), 32: ("bf16", 16), 36: ("tq1_0", 1),
    37: ("tq2_0", 2), 38: ("mxfp4_moe", 4), 39: ("nvfp4", 4), 40: ("q1_0", 1), 41: ("q2_0", 2),
}  # fmt: skip

_GUESSED = 1024  # flag of llama.cpp: the file did not say, the type was taken from the tensors


def is_guessed(file_type: int) -> bool:
    """Did llama.cpp take the type from the tensors, because the file does not say?"""
    return bool(file_type & _GUESSED)


def quant_of(file_type: int) -> tuple[str, int]:
    """The (name, bits) of a file type; one that is not known yet keeps its number in the name, so that it stays distinct."""
    file_type &= ~_GUESSED
    return _TYPES.get(file_type, (f"type_{file_type}", 32))
