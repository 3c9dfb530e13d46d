"""The judgment of one forward: faults, harmless differences and inherited ones."""

from __future__ import annotations

from dataclasses import dataclass, field

from otel_torch.parity.call_graph import ModuleCall, Role, RoleSide
from otel_torch.parity.finding import Kind
from otel_torch.parity.modules import ModulePath
from otel_torch.parity.parameters import ParameterPair
from otel_torch.parity.sides import Sides
from otel_torch.parity.tensor_pair import TensorPair
from otel_torch.parity.values import Relation, RelationState

# the kind of a fault by how its tensors compare; all others have other values
_KINDS: dict[RelationState, Kind] = {"order": "layout", "shape": "shape", "nonfinite": "nonfinite"}


@dataclass(frozen=True, slots=True, eq=False)
class Location:
    """An input or output of a call, on one side; without a call if the module is never called."""

    module: ModulePath
    side: RoleSide | None
    role: Role | None
    call: ModuleCall | None

    @property
    def maker(self) -> ModuleCall | None:
        """The call whose own code made the tensor: of an input, the one around the call."""
        if self.call is None or self.side == "output":
            return self.call
        return self.call.parent

    @staticmethod
    def of(role: Role) -> Location:
        """Return where a tensor was seen."""
        return Location(role.call.module_path, role.side, role, role.call)

    @staticmethod
    def of_module(module: ModulePath, call: ModuleCall | None = None) -> Location:
        """Return the output of a module whose tensors were not seen."""
        return Location(module, "output", None, call)


@dataclass(slots=True, eq=False)
class Fault:
    """Where a difference begins, on both sides.

    pair: The tensors that show it, None for a missing call. weights: Parameters of the module that
    were loaded with other numbers.
    """

    kind: Kind
    reference: Location | None
    port: Location | None
    pair: TensorPair | None
    relation: Relation | None
    weights: list[ParameterPair] = field(default_factory=list)


@dataclass(slots=True)
class Judgment:
    """faults: The first one first, then independent ones. healed: Mismatches without consequence.
    wrong: All other mismatches. unjudged: Names of the port's weights that differ, as all of their
    kind do, and that only wrong values are computed with.
    """

    diverged: bool
    faults: list[Fault] = field(default_factory=list)
    healed: list[TensorPair] = field(default_factory=list)
    wrong: list[TensorPair] = field(default_factory=list)
    unjudged: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class MissingModule:
    """A pair of modules of which one side never calls its own.

    port_is_idle: Whether that side is the port.
    """

    reference: ModulePath
    port: ModulePath
    port_is_idle: bool

    @property
    def called(self) -> ModulePath:
        """The module that is called."""
        return self.reference if self.port_is_idle else self.port

    @property
    def idle(self) -> ModulePath:
        """The module that is never called."""
        return self.port if self.port_is_idle else self.reference

    def fault(self, call: ModuleCall | None) -> Fault:
        """Return the fault of this module; `call` is the first call on the side that calls it."""
        calls = Sides(call, None) if self.port_is_idle else Sides(None, call)
        locations = (
            Location.of_module(self.reference, calls.reference),
            Location.of_module(self.port, calls.port),
        )
        return Fault("missing", *locations, None, None)


def kind_of(relation: Relation) -> Kind:
    """Return the kind of fault of two tensors that are not equal."""
    return _KINDS.get(relation.state, "value")
