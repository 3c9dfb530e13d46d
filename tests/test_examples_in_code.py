"""The examples that work in code, run as a person runs them: what they print and write is what they
promise.
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
    """What an example prints; nothing is switched on in its environment."""
    done = run_python(tmp_path, EXAMPLES / name, OTEL_TORCH_ENABLED="0")
    # `Traceback` is what torch and others print of errors that a thread or a destructor swallowed
    assert not re.search("Traceback|Warning", done.stderr), done.stderr
    return done.stdout


def test_a_training_run_becomes_a_picture_and_the_same_table_twice(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    pytest.importorskip("vl_convert")
    said = run(tmp_path, "activations_over_training.py")

    # a line for each of the 13 layers, in both halves of the picture, of 60 points each
    picture = ElementTree.parse(tmp_path / "activations_over_training.svg").getroot()
    assert picture.tag.endswith("}svg")
    traces = [path for path in picture.iter() if (path.get("d") or "").count("L") == 59]
    assert len(traces) == 2 * 13 and len({path.get("stroke") for path in traces}) == 13
    texts = {text.text for text in picture.iter() if text.tag.endswith("}text")}
    assert {"activations", "gradients", "optimizer step", "layer", "0", "12"} <= texts

    rows = lines(tmp_path / "training.jsonl")
    assert len(rows) == 2 * 13 * 60 and {row["phase"] for row in rows} == {"forward", "backward"}
    assert "activations_over_training.svg: 1560 values of 13 layers over 60 steps" in said
    assert "training.jsonl: 1560 of 1560 values are bitwise equal" in said

    # the story that the picture tells: the gradient of the first layer is nothing at first, and
    # grows a thousandfold
    steps = re.findall(r"step +(\d+): loss ([\d.]+);.* gradients ([\d.e-]+) and", said)
    assert [int(step) for step, _, _ in steps] == [0, 10, 20, 30, 40, 50, 59]
    assert float(steps[-1][1]) < float(steps[0][1]) / 2 and float(steps[-1][2]) > 1000 * float(
        steps[0][2]
    )


def test_patching_finds_the_only_layer_that_can_move_anything(tmp_path: Path) -> None:
    said = run(tmp_path, "activation_patching.py")
    assert "trained: 100% right; France -> Paris, Italy -> Rome" in said

    table = [
        [float(number) for number in row.split()]
        for row in re.findall(r"^layer \d  +([-\d. ]+)$", said, re.M)
    ]
    assert [len(row) for row in table] == [6, 6, 6, 6]
    for layer, row in enumerate(table):
        where = 1 if layer <= 1 else 5  # the country's token up to the mixing layer, then the last
        assert row[where] == pytest.approx(1, abs=0.02)
        assert [
            number for position, number in enumerate(row) if position != where
        ] == pytest.approx([0] * 5, abs=0.02)

    parts = {
        (int(layer), part): float(number)
        for layer, part, number in re.findall(r"layer (\d) (\w+) +(-?[\d.]+)$", said, re.M)
    }
    assert len(parts) == 8 and parts[1, "attention"] > 0.9
    assert [parts[layer, "attention"] for layer in (0, 2, 3)] == [0, 0, 0]
    assert said.endswith("the country goes from token 1 to the `?` in layer 1\n")


def test_both_bugs_of_a_port_are_named(tmp_path: Path) -> None:
    said = run(tmp_path, "debug_a_port.py")
    stopped, healed, mended = re.split(r"list all faults.*\n|with both bugs fixed:\n", said)
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
    assert mended.strip().startswith("no fault\n")
