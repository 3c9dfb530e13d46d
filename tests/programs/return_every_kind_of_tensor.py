"""Returns one kind of tensor after the other from a module, and prints what the program got.

usage: return_every_kind_of_tensor.py [KIND…]

Each kind has a model of its name, and where it can be differentiated, backward runs.
"""

import hashlib
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

warnings.simplefilter("ignore", UserWarning)  # prototype kinds of tensors say that they are


class Wrapper(torch.Tensor):
    """Holds its values in another tensor and has no memory of its own."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor, **options: Any):
        shape, dtype = inner.shape, inner.dtype
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, **options)

    def __init__(self, inner: torch.Tensor, **options: Any) -> None:
        self.inner = inner

    def __repr__(self) -> str:
        return "Wrapper()"

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        def unwrap(value: Any) -> Any:
            return value.inner if isinstance(value, Wrapper) else value

        args, kwargs = torch.utils._pytree.tree_map(unwrap, (args, kwargs or {}))
        result = function(*args, **kwargs)
        return cls(result) if isinstance(result, torch.Tensor) else result


class SilentWrapper(Wrapper):
    """Answers nothing: what it is asked raises."""

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        raise RuntimeError(f"no {function}")


class Subclass(torch.Tensor):
    pass


class SilentSubclass(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        raise RuntimeError(f"no {function}")


class SilentMemory(torch.Tensor):
    """Has memory of its own, and raises at every operation."""

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        raise RuntimeError(f"no {function}")


def values() -> torch.Tensor:
    return torch.arange(24.0).reshape(4, 6) - 7


def freed(keep: int = 0, start: int = 0) -> torch.Tensor:
    """Return a tensor whose memory was freed, but for the first bytes."""
    tensor = torch.arange(64.0)[start:]
    tensor.untyped_storage().resize_(keep)
    return tensor


def fake() -> torch.Tensor:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(4, 6)


def functional() -> torch.Tensor:
    return torch._to_functional_tensor(values())


def batched() -> torch.Tensor:
    """Return the tensor of a vmap that has ended."""
    escaped = []
    torch.vmap(lambda row: (escaped.append(row), row)[1])(values())
    return escaped[0]


def distributed() -> torch.Tensor:
    import torch.distributed as dist
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return distribute_tensor(values(), init_device_mesh("cpu", (1,)), [Shard(0)])


def masked() -> torch.Tensor:
    from torch.masked import masked_tensor

    return masked_tensor(values(), values() > 0)


def torchao() -> torch.Tensor:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    linear = nn.Linear(8, 8).bfloat16()
    quantize_(linear, Int8WeightOnlyConfig())
    return linear.weight.detach()


def two_tensor() -> torch.Tensor:
    from torch.testing._internal.two_tensor import TwoTensor

    return TwoTensor(values(), values())


def nested(layout: torch.layout, lengths: bool = False) -> torch.Tensor:
    if lengths:
        return torch.nested.narrow(
            values(), 1, torch.tensor([0, 1, 2, 1]), torch.tensor([1, 2, 3, 2]), layout=layout
        )
    return torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=layout)


def bytes_as(dtype: str) -> Callable[[], torch.Tensor]:
    return lambda: torch.arange(24, dtype=torch.uint8).reshape(4, 6).view(getattr(torch, dtype))


def quantized_by_channel() -> torch.Tensor:
    scales, zeros = torch.ones(4), torch.zeros(4, dtype=torch.long)
    return torch.quantize_per_channel(values(), scales, zeros, 0, torch.qint8)


def inference() -> torch.Tensor:
    with torch.inference_mode():
        return values()


def uncoalesced() -> torch.Tensor:
    return torch.sparse_coo_tensor([[0, 0, 2]], [1.0, 2.0, 3.0], (4,))


def ragged_view() -> torch.Tensor:
    """Return a tensor whose rows overlap in memory: a window that slides."""
    return torch.arange(2.0**17).unfold(0, 2**16, 1)


KINDS: dict[str, Callable[[], torch.Tensor]] = {
    "strided": values,
    "transposed": lambda: values().t(),
    "with_gaps": lambda: values()[:, ::2],
    "zero_dim": lambda: torch.tensor(3.0),
    "empty": lambda: torch.ones(0, 3),
    "empty_many": lambda: torch.ones(2**31, 0),
    "negative": lambda: torch.complex(values(), values()).conj().imag,
    "conjugate": lambda: torch.complex(values(), values()).conj(),
    "complex": lambda: torch.complex(values(), values()),
    "complex_half": lambda: torch.complex(values(), values()).to(torch.complex32),
    "expanded": lambda: torch.ones(1).expand(100_000, 100_000),
    "expanded_bytes": lambda: torch.ones(1, dtype=torch.uint8).expand(10**12),
    "expanded_row": lambda: torch.arange(1024.0).expand(10_000_000, 1024),
    "window": ragged_view,
    "freed": freed,
    "freed_view": lambda: freed(start=17),
    "freed_in_part": lambda: freed(keep=16),
    "zero_tensor": lambda: torch._efficientzerotensor((4, 6)),
    "lazy_clone": lambda: torch._lazy_clone(values()),
    "inference": inference,
    "parameter": lambda: nn.Parameter(values()),
    "leaf": lambda: values().requires_grad_(),
    "view_of_leaf": lambda: values().requires_grad_()[1:],
    "named": lambda: values().refine_names("rows", "columns"),
    "mkldnn": lambda: values().to_mkldnn(),
    "meta": lambda: torch.ones(4, 6, device="meta"),
    "meta_sparse": lambda: torch.empty(4, 6, device="meta", layout=torch.sparse_coo),
    "fake": fake,
    "functional": functional,
    "batched": batched,
    "sparse": lambda: values().to_sparse(),
    "sparse_uncoalesced": uncoalesced,
    "sparse_hybrid": lambda: values().to_sparse(1),
    "sparse_csr": lambda: values().to_sparse_csr(),
    "sparse_csc": lambda: values().to_sparse_csc(),
    "sparse_bsr": lambda: values().to_sparse_bsr((2, 2)),
    "sparse_bsc": lambda: values().to_sparse_bsc((2, 2)),
    "sparse_huge": lambda: torch.sparse_coo_tensor([[5], [6]], [1.0], (10**7, 10**7)),
    "sparse_csr_huge": lambda: torch.sparse_csr_tensor([0, 1], [5], [1.0], (1, 10**11)),
    "sparse_empty": lambda: torch.sparse_coo_tensor(size=(4, 6)),
    "nested_strided": lambda: nested(torch.strided),
    "nested_jagged": lambda: nested(torch.jagged),
    "nested_with_holes": lambda: nested(torch.jagged, lengths=True),
    "quantized": lambda: torch.quantize_per_tensor(values(), 0.5, 0, torch.quint8),
    "quantized_int32": lambda: torch.quantize_per_tensor(values(), 0.5, 0, torch.qint32),
    "quantized_by_channel": quantized_by_channel,
    "quantized_4_bits": lambda: torch.quantize_per_tensor(values(), 0.5, 0, torch.quint4x2),
    **{
        dtype: bytes_as(dtype)
        for dtype in (
            "bool", "int8", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float4_e2m1fn_x2",
            "bits8", "bits4x2", "bits2x4", "bits1x8", "uint4", "int2",
        )
        if hasattr(torch, dtype)
    },
    "bits16": lambda: torch.arange(24, dtype=torch.int16).view(torch.bits16),
    "uint64": lambda: values().abs().to(torch.uint64),
    "wrapper": lambda: Wrapper(values()),
    "wrapper_of_wrapper": lambda: Wrapper(Wrapper(values())),
    "wrapper_with_sizes": lambda: Wrapper(values(), dispatch_sizes_strides_policy="sizes"),
    "wrapper_with_grad": lambda: Wrapper(values(), requires_grad=True),
    "silent_wrapper": lambda: SilentWrapper(values()),
    "silent_wrapper_with_sizes": lambda: SilentWrapper(
        values(), dispatch_sizes_strides_policy="sizes", dispatch_layout=True, dispatch_device=True
    ),
    "subclass": lambda: values().as_subclass(Subclass),
    "subclass_with_grad": lambda: values().requires_grad_().as_subclass(Subclass),
    "silent_subclass": lambda: values().as_subclass(SilentSubclass),
    "silent_memory": lambda: values().as_subclass(SilentMemory),
    "two_tensor": two_tensor,
    "masked": masked,
    "torchao": torchao,
    "distributed": distributed,
}  # fmt: skip


class Returns(nn.Module):
    """Returns what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Identity()

    def forward(self, tensor: torch.Tensor) -> Any:
        return {"value": self.inner(tensor)}


def digest(tensor: torch.Tensor) -> str:
    """Return the bytes of the tensor's own memory, as far as it has any."""
    with torch._C.DisableTorchFunction():
        try:
            storage = tensor.untyped_storage()
            if not storage.data_ptr():
                return "no memory"
            size = min(storage.nbytes(), 2**12)
            return hashlib.sha256(bytes(storage[index] for index in range(size))).hexdigest()[:8]
        except Exception:
            return "no storage"


def run(kind: str) -> None:
    try:
        tensor = KINDS[kind]()
    except Exception as error:
        print(kind, "cannot be made here:", type(error).__name__)
        return
    net = type(kind, (Returns,), {})()
    for _ in range(2):
        net(tensor)
    print(kind, type(tensor).__name__, digest(tensor), flush=True)
    with torch._C.DisableTorchFunction():
        wants_grad = tensor.requires_grad
    if wants_grad:
        (net(tensor)["value"] * 2).sum().backward()
        print(kind, "differentiated", flush=True)


if __name__ == "__main__":
    torch.manual_seed(0)
    for kind in sys.argv[1:] or KINDS:
        run(kind)
    print("random", torch.rand(1).item())
