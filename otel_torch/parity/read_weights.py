"""The rule for weights that code reads without calling their module.

    y = F.linear(x, self.head.weight)        head is in the table of modules and never called
    x = words + self.places.weight[:length]  likewise

Such a module has no output that could be compared. If its weights differ, and the code around it is
the first to make a wrong tensor, the weights are at fault. So are those of a module that is called
and returns what it should: an embedding whose weight is also the head's, in the rows that no token
asked for.
"""

from __future__ import annotations

from collections.abc import Iterator

from otel_torch.parity.call_graph import ModuleCall, Program, Role, enclosing_names
from otel_torch.parity.evidence import Evidence
from otel_torch.parity.faults import Fault, Location
from otel_torch.parity.modules import ModulePath
from otel_torch.parity.parameter_names import pattern
from otel_torch.parity.parameters import ParameterPair
from otel_torch.parity.sides import Sides
from otel_torch.parity.tensor_pair import TensorPair

_Modules = Sides[ModulePath]


def find_read_weights(evidence: Evidence, first: TensorPair) -> Fault | None:
    """Return the fault of weights that differ and are read by the code which is first wrong."""
    fault = evidence.fault_of(first)
    if fault.weights or fault.reference is None or fault.port is None:
        return None
    reference, port = fault.reference.role, fault.port.role
    if reference is None or port is None:
        return None
    made = Sides(reference, port)
    makers = made.map(lambda role: role.maker)
    if makers.reference is None or makers.port is None:
        return None
    modules = _nearest_silent(evidence, made, makers) or _tied(evidence, made.port, makers.port)
    if modules is None:
        return None
    places = Sides(
        Location(modules.reference, made.reference.side, made.reference, makers.reference),
        Location(modules.port, made.port.side, made.port, makers.port),
    )
    weights = _known_to_differ(evidence, modules)
    return Fault("weights", *places, first, first.relation, weights)


def _known_to_differ(evidence: Evidence, modules: _Modules) -> list[ParameterPair]:
    weights = evidence.alignment.modules.weights[modules.reference, modules.port]
    return [weight for weight in weights if weight.differs]


def _with_other_weights(evidence: Evidence) -> Iterator[_Modules]:
    for reference, port in evidence.alignment.modules.weights:
        if _known_to_differ(evidence, Sides(reference, port)):
            yield Sides(reference, port)


def _nearest_silent(
    evidence: Evidence, made: Sides[Role], makers: Sides[ModuleCall | None]
) -> _Modules | None:
    """Return the last modules that are never called and in the table before the wrong tensor.

    They are inside of the module whose code made it, but of no called module inside of that.
    """
    alignment = evidence.alignment
    programs = Sides(alignment.reference, alignment.port)
    silent: list[tuple[int, _Modules]] = []
    for modules in _with_other_weights(evidence):
        sides = zip(
            *(modules, programs, alignment.modules.uncalled),
            *(alignment.modules.order, made, makers),
            strict=True,
        )
        for module, program, uncalled, order, role, maker in sides:
            if module not in uncalled or maker is None:
                continue
            position = order.get(module, 0)
            is_before = role.side == "output" or position < order.get(role.call.module_path, 0)
            if is_before and _reader(program, module) == maker.module_path:
                silent.append((position, modules))
    return max(silent, key=lambda item: item[0])[1] if silent else None


def _reader(program: Program, module: ModulePath) -> ModulePath | None:
    """Return the innermost called module around one that is never called.

    None if the same module of another block is called: this one had nothing to do.
    """
    called = {call.module_path for call in program.calls}
    if any(pattern(name) == pattern(module[1]) for model, name in called if model == module[0]):
        return None
    around = ((module[0], name) for name in enclosing_names(module[1]))
    return next((path for path in around if path in called), None)


def _tied(evidence: Evidence, made: Role, maker: ModuleCall | None) -> _Modules | None:
    """Return the modules whose weight may be a head's: one row for each channel of the output.

    What they return themselves is right.
    """
    owners = evidence.alignment.modules.owners.port
    shape = made.row.get("shape")
    is_own = maker is None or (not maker.children and maker.module_path in owners)
    if is_own or made.side != "output" or not isinstance(shape, list) or not shape:
        return None
    for modules in _with_other_weights(evidence):
        is_wide = any(
            weight.port[0].shape[:1] == (shape[-1],) and len(weight.port[0].shape) > 1
            for weight in _known_to_differ(evidence, modules)
        )
        calls = (c for c in evidence.alignment.port.calls if c.module_path == modules.port)
        pairs = [pair for call in calls for pair in evidence.output_pairs(call)]
        if is_wide and pairs and all(pair.is_right for pair in pairs):
            return modules
    return None
