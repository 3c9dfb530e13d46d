"""The Python API of a comparison: `otel_torch.diff(reference, port)` returns a `Report`."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from otel_torch.parity.bitwise import compare_bitwise
from otel_torch.parity.compare import compare
from otel_torch.parity.finding import Report
from otel_torch.parity.golden import compare_with_golden
from otel_torch.parity.map_file import load_map
from otel_torch.parity.naming import has_loader
from otel_torch.parity.pairing_finder import PairingFinder
from otel_torch.parity.sides import Sides
from otel_torch.recording.input_file import require_regular_file
from otel_torch.recording.metadata import read_metadata
from otel_torch.recording.remote.remote_files import takes_urls
from otel_torch.rendering.table import as_given


@takes_urls("reference", "port", "noise", "golden", folders=("tensors",))
def diff(
    reference: str | Path,
    port: str | Path | None = None,
    *,
    models: tuple[str, str] | None = None,
    noise: str | Path | None = None,
    golden: str | Path | None = None,
    map: str | Path | None = None,
    save_map: str | Path | None = None,
    rtol: float | None = None,
    progress: Callable[[str], None] = lambda text: None,
    save_isolation: str | Path | None = None,
    tensors: tuple[str | Path, str | Path] | None = None,
    bitwise: bool = False,
    warm_ups: bool = False,
    quantized: bool = False,
    on: str | None = None,
) -> Report:
    """Compare the recording of a port with that of its reference.

    Args:
        reference: A recording made with OTEL_TORCH_CAPTURE=parity, or a folder with the recordings
            of all ranks; or its URL. Other recordings are compared by statistics alone; the
            report then has `weaker` set.
        port: The recording of the port, likewise. By default, that of the reference, of which
            `models` are compared.
        models: The reference's model and the port's, by their names in the recordings: of each
            recording, only this model is compared.
        noise: A second recording of the reference, made with OTEL_TORCH_NOISE.
        golden: A recording of the same computation in higher precision; the report says which of
            the two is nearer to it, module by module.
        map: A TOML file that pairs names.
        save_map: Where to write the pairing that was found.
        rtol: A relative L2 error that replaces the tolerances of the dtypes.
        progress: Called from time to time with a short text.
        save_isolation: A folder of the reference's tensors; receives the pairing for a run of the
            port with OTEL_TORCH_ISOLATE.
        tensors: The OTEL_TORCH_TENSORS folders of the reference's and the port's run, which show
            where in its tensor a finding is, and often what it is. By default, those that the
            recordings name, if they are still there.
        bitwise: Compare two runs of one program bit by bit, by the keys of their records. Takes
            none of the options above but `progress` and `on`.
        quantized: Take the port for one that computes in lower precision on purpose, as one whose
            weights were rounded to 8 bits and stored as floats. By default, their types tell.
        warm_ups: Compare forwards of phase `warmup`, too: those that a framework ran for itself.
        on: `ray`, or the address of a Ray cluster (`ray://HOST:PORT`) whose machines see the same
            files: they compare the ranks of folders. By default, processes of this machine do.

    Returns:
        The report; `report.as_json()` is what `otel-torch diff --json` prints.

    Raises:
        ValueError: For bad input; the message is one line.
        OSError: If a file cannot be read or written.
    """
    if port is None:
        if models is None:
            raise ValueError(
                f"{reference} is one recording: give that of the port, too, or the two models to "
                "compare"
            )
        port = reference
    for path in (reference, port, noise, golden):
        if path is not None:
            require_regular_file(path)  # before the long part begins
    if bitwise:
        options = noise, golden, map, save_map, rtol, save_isolation, tensors, models
        if any(option is not None for option in options):
            raise ValueError(
                "a bitwise comparison tolerates no error and pairs equal names: "
                "leave out --noise, --golden, --rtol, --map, --save-map, --save-isolation, "
                "--tensors and --models"
            )
        return compare_bitwise(reference, port, progress, warm_ups=warm_ups, on=on)
    chosen = None if models is None else Sides(*models)
    pairing = None if save_isolation is None else PairingFinder()
    report = compare(
        reference,
        port,
        models=chosen,
        noise=noise,
        rtol=rtol,
        map=None if map is None else load_map(map),
        save_map=save_map,
        progress=progress,
        pairing=pairing,
        tensors=None if tensors is None else Sides(Path(tensors[0]), Path(tensors[1])),
        warm_ups=warm_ups,
        quantized=quantized,
        on=on,
    )
    if report.by_tokens and save_isolation is not None:
        raise ValueError(
            "an isolated run replaces whole tensors, and these programs batch their tokens "
            "differently: leave out --save-isolation, or record both with equal batches"
        )
    if pairing is not None and save_isolation is not None:
        pairing.pairing().save(save_isolation)
    if golden is not None and report.verdict != "incomparable":
        report.golden = compare_with_golden(golden, reference, port, progress, chosen)
    report.models = models
    report.warnings[:0] = _warn_of_mixed_up_files(reference, port, noise, models)
    name_files_as_given(report)
    return report


def name_files_as_given(report: Report) -> None:
    """Change the names of files in a report: a user gave URLs instead of their copies here."""
    report.reference, report.port = as_given(report.reference), as_given(report.port)
    report.warnings = [as_given(warning) for warning in report.warnings]
    report.uncompared = [as_given(warning) for warning in report.uncompared]
    report.reason = None if report.reason is None else as_given(report.reason)


def _warn_of_mixed_up_files(
    reference: str | Path,
    port: str | Path,
    noise: str | Path | None,
    models: tuple[str, str] | None,
) -> list[str]:
    """Return a warning for each argument that is probably a mistake."""
    warnings = []
    if os.path.samefile(reference, port) and (models is None or models[0] == models[1]):
        warnings.append(
            f"{reference} and {port} are the same file, so they always match; --models takes two "
            "models of it"
        )
    if noise is not None:
        if os.path.samefile(reference, noise):
            warnings.append(f"{noise} is the reference itself, so its noise is zero")
        elif _is_recorded_without_noise(noise):
            warnings.append(
                f"{noise} was recorded without OTEL_TORCH_NOISE, so it may hold no noise; "
                "record it with OTEL_TORCH_NOISE=1"
            )
    if has_loader(read_metadata(reference)) and not has_loader(read_metadata(port)):
        warnings.append(
            f"{reference} has a port's mapping of parameter names and {port} has none: "
            "are the two arguments swapped?"
        )
    return warnings


def _is_recorded_without_noise(recording: str | Path) -> bool:
    settings = read_metadata(recording).get("settings")
    return settings is not None and "OTEL_TORCH_NOISE" not in settings
