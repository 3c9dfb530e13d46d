"""Old definitions in the text of a new module: what results is run."""

from __future__ import annotations

from collections.abc import Collection
from textwrap import dedent
from typing import Any

import pytest

from otel_torch.bisecting.versions.splice import WHOLE_MODULE, DoesNotFit, ModuleSplice

OLD = dedent("""\
    import math
    from functools import reduce

    HALF = 0.5

    def _helper(x):
        return x * HALF

    def mix(x, y):
        return x + _helper(y)

    class Base:
        def name(self):
            return "old base"

    class Layer(Base):
        offset = 1

        def forward(self, x):
            return math.floor(x) + self.offset

        def name(self):
            return "old " + super().name()

        def product(self, values):
            return reduce(lambda a, b: a * b, values)
    """)
NEW = dedent("""\
    class Base:
        def name(self):
            return "new base"

    def mix(x, y):
        # another line
        return x + y

    class Layer(Base):
        offset = 2

        def forward(self, x):
            return x + self.offset

        def product(self, values):
            return 0

        def extra(self):
            return 1
    """)


def run(names: Collection[str], old: str = OLD, new: str = NEW) -> dict[str, Any]:
    text = ModuleSplice(old, new).splice(names)
    module: dict[str, Any] = {"__name__": "module"}
    exec(compile(text, "module.py", "exec"), module)
    return module


def test_a_function_takes_along_what_the_new_module_lacks() -> None:
    module = run({"mix"})
    assert module["mix"](1, 1) == 1.5
    assert module["Layer"]().offset == 2


def test_a_method_brings_its_import_and_the_rest_stays_new() -> None:
    layer = run({"Layer.forward"})["Layer"]()
    assert layer.forward(2.7) == 4
    assert layer.name() == "new base"
    assert run({"Layer.product"})["Layer"]().product([2, 3]) == 6


def test_a_removed_method_comes_back_with_its_class_cell() -> None:
    assert run({"Layer.name"})["Layer"]().name() == "old new base"


def test_an_added_method_goes() -> None:
    assert not hasattr(run({"Layer.extra"})["Layer"], "extra")


def test_a_class_and_a_module_are_exchanged_as_a_whole() -> None:
    layer = run({"Layer", "Layer.forward"})["Layer"]()
    assert (layer.offset, layer.forward(2.7), layer.name()) == (1, 3, "old new base")
    assert run({WHOLE_MODULE})["Base"]().name() == "old base"


def test_several_definitions_at_once() -> None:
    module = run({"mix", "Layer.offset", "Base.name"})
    assert module["mix"](1, 1) == 1.5
    assert module["Layer"]().offset == 1 and module["Layer"]().name() == "old base"


def test_what_needs_a_name_of_its_class_is_exchanged_with_it() -> None:
    old = "class A:\n    n = 2\n    m = n + 1\n"
    new = "class A:\n    k = 2\n    m = k + 2\n"
    splice = ModuleSplice(old, new)
    with pytest.raises(DoesNotFit, match="the new module has no n"):
        splice.splice({"A.m"})
    assert splice.fitting_unit("A.m") == ("A", "A.m: the new module has no n")
    assert run({"A"}, old, new)["A"].m == 3


def test_indentation_follows_the_new_module() -> None:
    new = "if True:\n    def mix(x, y):\n        return 0\n"
    assert run({"mix"}, OLD, new)["mix"](1, 1) == 1.5


def test_a_name_that_only_an_annotation_has_is_not_imported() -> None:
    old = "from gone import Kind\n\ndef f(x: Kind) -> Kind:\n    y: Kind = x + 1\n    return y\n"
    assert run({"f"}, old, "def f(x):\n    return x\n")["f"](1) == 2


def test_a_text_over_several_lines_may_begin_left_of_its_method() -> None:
    old = 'import math\n\nclass A:\n    def f(self, x):\n        s = """\n1"""\n        return math.floor(x), s\n'
    new = "class A:\n    def f(self, x):\n        return x\n"
    assert run({"A.f"}, old, new)["A"]().f(1.5) == (1, "\n1")


def test_a_local_name_hides_no_helper_that_another_function_needs() -> None:
    old = "def scale(x):\n    return 2 * x\n\nclass A:\n    def scale(self, x):\n        return scale(x)\n"
    new = "class A:\n    def scale(self, x):\n        return x\n"
    assert run({"A.scale"}, old, new)["A"]().scale(3) == 6
