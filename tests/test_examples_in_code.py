"""The examples of tools for use in code, run as a user runs them: they print and write what their
docstrings promise.
"""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.support import lines, run_python

pytestmark = pytest.mark.scoreboard
EXAMPLES = Path(__file__).parents[1] / "examples"


def run(tmp_path: Path, name: str) -> str:
    """Return the output of an example, run without recording."""
    done = run_python(tmp_path, EXAMPLES / name, OTEL_TORCH_ENABLED="0")
    # torch and others print `Traceback` for errors in threads and destructors
    assert not re.search("Traceback|Warning", done.stderr), done.stderr
    return done.stdout


def test_a_training_run_gives_a_picture_and_the_same_table_twice(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    pytest.importorskip("vl_convert")
    output = run(tmp_path, "activations_over_training.py")

    # in both halves of the picture, one line of 60 points for each of the 13 layers
    picture = ElementTree.parse(tmp_path / "activations_over_training.svg").getroot()
    assert picture.tag.endswith("}svg")
    traces = [path for path in picture.iter() if (path.get("d") or "").count("L") == 59]
    assert len(traces) == 2 * 13 and len({path.get("stroke") for path in traces}) == 13
    texts = {text.text for text in picture.iter() if text.tag.endswith("}text")}
    assert {"activations", "gradients", "optimizer step", "layer", "0", "12"} <= texts

    rows = lines(tmp_path / "training.jsonl")
    assert len(rows) == 2 * 13 * 60 and {row["phase"] for row in rows} == {"forward", "backward"}
    assert "activations_over_training.svg: 1560 values of 13 layers over 60 steps" in output
    assert "training.jsonl: 1560 of 1560 values are bitwise equal" in output

    # the gradient of the first layer starts near zero and grows a thousandfold
    steps = re.findall(r"step +(\d+): loss ([\d.]+);.* gradients ([\d.e-]+) and", output)
    assert [int(step) for step, _, _ in steps] == [0, 10, 20, 30, 40, 50, 59]
    assert float(steps[-1][1]) < float(steps[0][1]) / 2 and float(steps[-1][2]) > 1000 * float(
        steps[0][2]
    )


def test_patching_finds_the_only_layer_that_mixes_tokens(tmp_path: Path) -> None:
    output = run(tmp_path, "activation_patching.py")
    assert "trained: 100% right; France -> Paris, Italy -> Rome" in output

    table = [
        [float(number) for number in row.split()]
        for row in re.findall(r"^layer \d  +([-\d. ]+)$", output, re.M)
    ]
    assert [len(row) for row in table] == [6, 6, 6, 6]
    for layer, row in enumerate(table):
        # the country's token up to the mixing layer, then the last
        decisive = 1 if layer <= 1 else 5
        assert row[decisive] == pytest.approx(1, abs=0.02)
        assert [
            number for position, number in enumerate(row) if position != decisive
        ] == pytest.approx([0] * 5, abs=0.02)

    parts = {
        (int(layer), part): float(number)
        for layer, part, number in re.findall(r"layer (\d) (\w+) +(-?[\d.]+)$", output, re.M)
    }
    assert len(parts) == 8 and parts[1, "attention"] > 0.9
    assert [parts[layer, "attention"] for layer in (0, 2, 3)] == [0, 0, 0]
    assert output.endswith("the country goes from token 1 to the `?` in layer 1\n")


def test_both_bugs_of_a_port_are_named(tmp_path: Path) -> None:
    output = run(tmp_path, "debug_a_port.py")
    stopped, healed, fixed = re.split(r"list all faults.*\n|with both bugs fixed:\n", output)
    position = "positions (transformer.wpe of the reference), in[0], call 0: computed by code before this module"
    attention = "layers.1.proj (transformer.h.1.attn.c_proj of the reference), in[0], call 0: computed by code before this module"
    assert position in stopped and attention not in stopped
    assert "reference [0, 1, 2, 3]" in stopped and "port      [1, 2, 3, 4]" in stopped
    first, second, count = healed.strip().splitlines()
    assert (
        first.startswith(position)
        and second.strip().startswith(attention)
        and "tensors compared" in count
    )
    assert fixed.strip().startswith("no fault\n")
