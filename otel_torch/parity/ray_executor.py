"""Compare the ranks on a cluster of Ray, whose machines see the same files.

A task whose machine is lost is run again on another one.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

from otel_torch.parity.finding import Report

_ANSWER_S = 10


class RayExecutor:
    """A Ray cluster, or Ray's processes on this machine.

    Args:
        address: `ray`: the cluster that `RAY_ADDRESS` names or that runs here, or else this
            machine; `ray://HOST:PORT`: the one there.

    Raises:
        ValueError: Ray is not installed, or there is no such cluster.
    """

    def __init__(self, address: str) -> None:
        try:
            import ray
        except ImportError:
            raise ValueError(
                f"{address}: Ray is not installed: pip install 'otel-torch[ray]'"
            ) from None
        self._ray: Any = ray
        self._is_ours = not ray.is_initialized()
        if self._is_ours:
            self._connect(address)
        self.workers = max(1, int(self._ray.cluster_resources().get("CPU", 1)))

    def _connect(self, address: str) -> None:
        _require_answer(address)
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
        try:
            if address != "ray":
                self._ray.init(address, **quiet)
                return
            try:
                self._ray.init("auto", **quiet)
            except ConnectionError:
                self._ray.init(include_dashboard=False, **quiet)
        except Exception as error:  # Ray raises a plain one where a node does not start in time
            reason = str(error).partition("\n")[0]
            raise ValueError(f"{address}: no cluster of Ray answers: {reason}") from None

    def submit(self, function: Callable[..., Report], *arguments: object) -> Any:
        """Begin a call."""
        return _RayCall(self._ray, self._ray.remote(function).remote(*arguments))

    def close(self) -> None:
        """Leave the cluster, if it was joined here."""
        if self._is_ours:
            self._ray.shutdown()


def _require_answer(address: str) -> None:
    """Raise ValueError if nothing listens at an address: Ray itself tries for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdecimal():
        return
    try:
        socket.create_connection((host, int(port)), _ANSWER_S).close()
    except (OSError, OverflowError) as error:
        raise ValueError(f"{address}: no cluster of Ray answers: {error}") from None


class _RayCall:
    def __init__(self, ray: Any, reference: Any) -> None:
        self._ray, self._reference = ray, reference

    def result(self) -> Report:
        """Return what the call returns, or raise what it raises."""
        try:
            report: Report = self._ray.get(self._reference)
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause from None
        return report
