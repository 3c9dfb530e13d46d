"""Rows of ranks that give each other values."""

from __future__ import annotations

from binascii import b2a_base64
from typing import Any

import numpy as np

from otel_torch.parity.operations.join_ranks import join_ranks


def row(value: int, content: list[float], *reads: int, **fields: Any) -> dict[str, Any]:
    sketch = b2a_base64(np.array(content, "<f4").tobytes()).decode()
    row = {"op": "mul", "tensor": f"op[{value}]", "value": value, "reads": list(reads)}
    return row | {"sketch": sketch} | fields


def collective(value: int, content: list[float], *reads: int, **fields: Any) -> dict[str, Any]:
    return row(value, content, *reads, op="c10d", collective=True, **fields)


def edges(*ranks: list[dict[str, Any]]) -> list[tuple[int, list[int]]]:
    return [(joined["value"], joined["reads"]) for joined in join_ranks(ranks)]


def test_what_is_gathered_is_read_of_the_ranks_that_have_it() -> None:
    first = [row(1, [1, 2]), *gathered(2, 1), row(4, [9, 9], 2, 3)]
    second = [row(11, [3, 4]), *gathered(12, 11), row(14, [8, 8], 12, 13)]
    joined = edges(first, second)
    assert dict(joined)[2] == [1, 11] and dict(joined)[12] == [11, 1]
    order = [value for value, _ in joined]
    assert order.index(11) < order.index(2)
    # each rank keeps its order
    assert [value for value in order if value < 10] == [1, 2, 3, 4]
    assert [value for value in order if value > 10] == [11, 12, 13, 14]


def gathered(value: int, own: int) -> list[dict[str, Any]]:
    contents = [1.0, 2.0], [3.0, 4.0]
    return [
        collective(value + place, content, own, tensor=f"op[{value}][{place}]")
        for place, content in enumerate(contents)
    ]


def test_what_is_received_comes_from_any_value_of_another_rank() -> None:
    joined = edges([collective(1, [5, 6]), row(2, [7, 7], 1)], [row(11, [5, 6])])
    assert joined == [(11, []), (1, [11]), (2, [1])]


def test_a_sum_comes_from_its_own_operands() -> None:
    first = [row(1, [1, 2]), collective(2, [4, 6], 1), row(3, [4, 6], 2)]
    second = [row(11, [3, 4]), collective(12, [4, 6], 11), row(13, [4, 6], 12)]
    joined = edges(first, second)
    assert dict(joined)[2] == [1] and dict(joined)[12] == [11]


def test_parts_and_sums_are_of_what_all_ranks_of_a_group_gave_in_the_same_call() -> None:
    def exchanges(value: int, given: int, group: list[int]) -> list[dict[str, Any]]:
        content = [value + 0.5, value + 0.25]
        return [row(given, [given, 1]), collective(value, content, given, group=group)]

    pairs = [0, 1], [0, 1], [2, 3], [2, 3]
    ranks = [
        [
            *exchanges(10 * rank + 1, 10 * rank, group),
            *exchanges(10 * rank + 3, 10 * rank + 2, group),
        ]
        for rank, group in enumerate(pairs, 1)
    ]
    joined = dict(edges(*ranks))
    assert joined[11] == [10, 20] and joined[23] == [22, 12]
    assert joined[31] == [30, 40] and joined[43] == [42, 32]


def test_what_a_rank_sends_to_others_is_its_own() -> None:
    first = [row(1, [1, 2]), collective(2, [1, 2], 1, group=[0, 1])]
    second = [row(11, [0, 5]), collective(12, [1, 2], 11, group=[0, 1])]
    joined = dict(edges(first, second))
    assert joined[2] == [1] and joined[12] == [11, 1]


def test_values_that_wait_for_each_other_came_about_otherwise() -> None:
    first = [collective(1, [1, 2]), row(2, [3, 4], 1)]
    second = [collective(11, [3, 4]), row(12, [1, 2], 11)]
    assert edges(first, second) == [(1, []), (2, [1]), (11, [2]), (12, [11])]
