"""Which definitions differ between two versions of a module."""

from __future__ import annotations

from textwrap import dedent

from otel_torch.bisecting.versions.definitions import changed_definitions, definitions_of

OLD = dedent('''\
    """Old words."""
    EPS = 1e-5

    @decorated
    def plain(x):
        """Say it."""
        return x + 1

    class Layer(Base):
        scale: float = 1.0

        def forward(self, x):
            return plain(x) * self.scale

        def reset(self):
            pass

        @property
        def size(self):
            return 1

        @size.setter
        def size(self, value):
            self._size = value

    if FLAG:
        def chosen(x):
            return x
    ''')


def changes(new: str, old: str = OLD) -> set[str]:
    return set(changed_definitions(definitions_of(old), definitions_of(new)))


def test_what_changes_no_number_is_no_change() -> None:
    new = OLD.replace("Old words", "New words").replace('"""Say it."""', "# say it")
    new = new.replace("def plain(x):", "def plain(\n    x: int,\n) -> int:")
    assert changes(new) == set()


def test_a_function_a_method_a_value_and_one_under_a_condition() -> None:
    new = OLD.replace("x + 1", "x + 2").replace("plain(x) * ", "plain(x) / ")
    new = new.replace("1e-5", "1e-6").replace("        return x\n", "        return -x\n")
    assert changes(new) == {"EPS", "plain", "Layer.forward", "chosen"}


def test_a_decorator_or_a_default_is_part_of_a_function() -> None:
    assert changes(OLD.replace("@decorated\n", "")) == {"plain"}
    assert changes(OLD.replace("forward(self, x)", "forward(self, x=1)")) == {"Layer.forward"}


def test_bases_are_part_of_a_class_and_fields_keep_their_annotations() -> None:
    assert changes(OLD.replace("(Base)", "(Other)")) == {"Layer"}
    assert changes(OLD.replace("scale: float", "scale: int")) == {"Layer.scale"}


def test_a_method_that_one_version_lacks_counts_and_a_function_does_not() -> None:
    without = OLD.replace("    def reset(self):\n        pass\n", "").replace("@decorated\n", "")
    without = without.replace("def plain(x)", "def renamed(x)")
    assert changes(without) == {"Layer.reset"} == changes(OLD, without)


def test_several_definitions_of_one_name_are_told_apart() -> None:
    assert [name for name in definitions_of(OLD) if "size" in name] == [
        "Layer.size",
        "Layer.size#2",
    ]
    new = OLD.replace("self._size = value", "self._size = 2 * value")
    assert changes(new) == {"Layer.size#2"}
