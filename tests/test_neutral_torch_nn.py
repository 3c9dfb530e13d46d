"""Every module class of torch.nn computes the same bits recorded as bare, on the same way.

A class that is in neither table below fails, so that those of a new torch are noticed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from tests.support import recording
from tests.test_neutral import ALL_STATS, EVERYTHING, bits, random_state, seed

# these have no forward of their own
ABSTRACT = {
    "Container", "Module", "ModuleDict", "ModuleList", "ParameterDict", "ParameterList",
    "RNNBase", "RNNCellBase",
}  # fmt: skip


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


def classes(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(high, shape)


def signs(*shape: int) -> torch.Tensor:
    return torch.randint(2, shape) * 2 - 1.0


@dataclass(frozen=True)
class Case:
    """How a class is made, and what it is called with."""

    inputs: Callable[[], Any]
    make: Callable[[Any], nn.Module] = lambda cls: cls()


def case(inputs: Callable[[], Any], *args: Any, **options: Any) -> Case:
    return Case(inputs, lambda cls: cls(*args, **options))


def of_each_dimension(
    name: str, *args: Any, size: int = 6, dimensions: tuple[int, ...] = (1, 2, 3), **options: Any
) -> dict[str, list[Case]]:
    """Return a case for `name` followed by `1d`, `2d` and `3d`."""
    return {
        f"{name}{count}d": [
            case(lambda count=count: normal(2, 4, *[size] * count), *args, **options)
        ]
        for count in dimensions
    }


def fully_masked() -> torch.Tensor:
    """Return a padding mask of 3 sequences of 6 tokens, of which the second is nothing else."""
    mask = torch.zeros(3, 6, dtype=torch.bool)
    mask[1] = True
    mask[0, 4:] = True
    return mask


def partly_masked() -> torch.Tensor:
    return torch.arange(6).expand(3, 6) >= torch.tensor([[6], [4], [2]])


def unpooled(dimensions: int) -> Any:
    pool = getattr(nn, f"MaxPool{dimensions}d")(2, return_indices=True)
    return tuple(pool(normal(2, 4, *[6] * dimensions)))


def log_softmax(*shape: int) -> torch.Tensor:
    return normal(*shape).log_softmax(-1)


def ctc() -> Any:
    return log_softmax(8, 2, 5), classes(4, 2, 3) + 1, torch.tensor([8, 7]), torch.tensor([3, 2])


def encoder(norm_first: bool = False, **options: Any) -> Callable[[Any], nn.Module]:
    def make(cls: Any) -> nn.Module:
        layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, norm_first=norm_first)
        return cls(layer, 2, **options)

    return make


def masked(mask: Callable[[], torch.Tensor]) -> Callable[[], Any]:
    return lambda: (normal(3, 6, 16), {"src_key_padding_mask": mask()})


def attended(**options: Any) -> Callable[[], Any]:
    def inputs() -> Any:
        x = normal(3, 6, 16)
        return x, x, x, {name: value() for name, value in options.items()}

    return inputs


_ELEMENTWISE = (
    "AlphaDropout", "CELU", "Dropout", "ELU", "FeatureAlphaDropout", "Flatten", "GELU", "GLU",
    "Hardshrink", "Hardsigmoid", "Hardswish", "Hardtanh", "Identity", "LeakyReLU", "LogSigmoid",
    "Mish", "PReLU", "RReLU", "ReLU", "ReLU6", "SELU", "SiLU", "Sigmoid", "Softplus",
    "Softshrink", "Softsign", "Tanh", "Tanhshrink",
)  # fmt: skip
_LOSSES = ("HuberLoss", "L1Loss", "MSELoss", "PoissonNLLLoss", "SmoothL1Loss")
_PADDINGS = ("CircularPad", "ReflectionPad", "ReplicationPad", "ZeroPad")

CASES: dict[str, list[Case]] = {
    **{name: [case(lambda: normal(2, 4, 6))] for name in _ELEMENTWISE},
    **{name: [case(lambda: (normal(4, 3), normal(4, 3)))] for name in _LOSSES},
    **{
        name: cases
        for padding in _PADDINGS
        for name, cases in of_each_dimension(padding, 2).items()
    },
    **of_each_dimension("ConstantPad", 2, 0.5),
    **of_each_dimension("AdaptiveAvgPool", 3),
    **of_each_dimension("AdaptiveMaxPool", 3),
    **of_each_dimension("AvgPool", 2),
    **of_each_dimension("MaxPool", 2),
    **of_each_dimension("LPPool", 2, 2),
    **of_each_dimension("FractionalMaxPool", 2, output_size=3, dimensions=(2, 3)),
    **{f"MaxUnpool{count}d": [case(lambda count=count: unpooled(count), 2)] for count in (1, 2, 3)},
    **of_each_dimension("Conv", 4, 3, 3),
    **of_each_dimension("ConvTranspose", 4, 3, 3),
    **of_each_dimension("LazyConv", 3, 3),
    **of_each_dimension("LazyConvTranspose", 3, 3),
    **of_each_dimension("BatchNorm", 4),
    **of_each_dimension("LazyBatchNorm"),
    **of_each_dimension("InstanceNorm", 4, affine=True, track_running_stats=True),
    **of_each_dimension("LazyInstanceNorm", affine=True),
    **of_each_dimension("Dropout"),
    "AdaptiveLogSoftmaxWithLoss": [
        case(lambda: (normal(5, 8), classes(10, 5)), 8, 10, cutoffs=[3, 6])
    ],
    "BCELoss": [case(lambda: (torch.rand(4, 3), torch.rand(4, 3)))],
    "BCEWithLogitsLoss": [case(lambda: (normal(4, 3), torch.rand(4, 3)))],
    "Bilinear": [case(lambda: (normal(5, 3), normal(5, 4)), 3, 4, 2)],
    "CTCLoss": [case(ctc)],
    "ChannelShuffle": [case(lambda: normal(2, 4, 3, 3), 2)],
    "CosineEmbeddingLoss": [case(lambda: (normal(4, 3), normal(4, 3), signs(4)))],
    "CosineSimilarity": [case(lambda: (normal(4, 3), normal(4, 3)))],
    "CrossEntropyLoss": [case(lambda: (normal(4, 3), classes(3, 4)))],
    "CrossMapLRN2d": [case(lambda: normal(2, 4, 3, 3), 2)],
    "DataParallel": [Case(lambda: normal(2, 4), lambda cls: cls(nn.Linear(4, 3)))],
    "Embedding": [case(lambda: classes(7, 2, 3), 7, 4, padding_idx=0)],
    "EmbeddingBag": [case(lambda: classes(7, 2, 3), 7, 4)],
    "Fold": [case(lambda: normal(2, 12, 9), 4, 2)],
    "GRU": [case(lambda: normal(5, 2, 4), 4, 3, num_layers=2, dropout=0.3, bidirectional=True)],
    "GRUCell": [case(lambda: normal(2, 4), 4, 3)],
    "GaussianNLLLoss": [case(lambda: (normal(4, 3), normal(4, 3), torch.rand(4, 3)))],
    "GroupNorm": [case(lambda: normal(2, 4, 6), 2, 4)],
    "HingeEmbeddingLoss": [case(lambda: (normal(4, 3), signs(4, 3)))],
    "KLDivLoss": [case(lambda: (log_softmax(4, 3), torch.rand(4, 3)))],
    "LSTM": [
        case(lambda: normal(5, 2, 4), 4, 3, num_layers=2, dropout=0.3),
        case(lambda: normal(2, 5, 4), 4, 3, proj_size=2, batch_first=True),
        case(lambda: nn.utils.rnn.pack_padded_sequence(normal(5, 2, 4), [5, 3]), 4, 3),
    ],
    "LSTMCell": [case(lambda: normal(2, 4), 4, 3)],
    "LayerNorm": [case(lambda: normal(2, 4, 6), 6)],
    "LazyLinear": [case(lambda: normal(2, 4), 3)],
    "Linear": [case(lambda: normal(2, 4), 4, 3)],
    "LinearCrossEntropyLoss": [case(lambda: (normal(5, 8), classes(10, 5)), 8, 10)],
    "LocalResponseNorm": [case(lambda: normal(2, 4, 6), 2)],
    "LogSoftmax": [case(lambda: normal(2, 4), -1)],
    "MarginRankingLoss": [case(lambda: (normal(4), normal(4), signs(4)))],
    "MultiLabelMarginLoss": [case(lambda: (normal(2, 4), torch.tensor([[3, 0, -1, 1]] * 2)))],
    "MultiLabelSoftMarginLoss": [case(lambda: (normal(4, 3), classes(2, 4, 3).float()))],
    "MultiMarginLoss": [case(lambda: (normal(4, 3), classes(3, 4)))],
    "MultiheadAttention": [
        case(attended(key_padding_mask=fully_masked), 16, 4, dropout=0.2, batch_first=True),
        case(attended(need_weights=bool, attn_mask=lambda: normal(6, 6)), 16, 4, batch_first=True),
        case(attended(), 16, 4),
        case(attended(), 16, 4, kdim=16, vdim=16, bias=False, add_zero_attn=True),
    ],
    "NLLLoss": [case(lambda: (log_softmax(4, 3), classes(3, 4)))],
    "NLLLoss2d": [case(lambda: (normal(2, 3, 4, 4).log_softmax(1), classes(3, 2, 4, 4)))],
    "PairwiseDistance": [case(lambda: (normal(4, 3), normal(4, 3)))],
    "PixelShuffle": [case(lambda: normal(2, 4, 3, 3), 2)],
    "PixelUnshuffle": [case(lambda: normal(2, 1, 4, 4), 2)],
    "RMSNorm": [case(lambda: normal(2, 4, 6), 6)],
    "RNN": [case(lambda: normal(5, 2, 4), 4, 3, nonlinearity="relu")],
    "RNNCell": [case(lambda: normal(2, 4), 4, 3)],
    "Sequential": [
        Case(lambda: normal(2, 4), lambda cls: cls(nn.Linear(4, 3), nn.ReLU(inplace=True)))
    ],
    "SoftMarginLoss": [case(lambda: (normal(4, 3), signs(4, 3).long()))],
    "Softmax": [case(lambda: normal(2, 4), -1)],
    "Softmax2d": [case(lambda: normal(2, 4, 3, 3))],
    "Softmin": [case(lambda: normal(2, 4), -1)],
    "SyncBatchNorm": [case(lambda: normal(2, 4, 6), 4)],
    "Threshold": [case(lambda: normal(2, 4), 0.1, 20)],
    "Transformer": [
        case(
            lambda: (normal(3, 6, 16), normal(3, 4, 16), {"src_key_padding_mask": partly_masked()}),
            16, 4, 2, 2, 32, batch_first=batch_first, norm_first=norm_first,
        )
        for batch_first, norm_first in ((True, False), (True, True))
    ],
    "TransformerDecoder": [
        Case(
            lambda: (normal(3, 4, 16), normal(3, 6, 16)),
            lambda cls: cls(nn.TransformerDecoderLayer(16, 4, 32, batch_first=True), 2),
        )
    ],
    "TransformerDecoderLayer": [
        case(lambda: (normal(3, 4, 16), normal(3, 6, 16)), 16, 4, 32, batch_first=True)
    ],
    "TransformerEncoder": [
        Case(masked(mask), encoder(**options))
        for mask in (partly_masked, fully_masked)
        for options in ({}, {"norm_first": True}, {"enable_nested_tensor": False})
    ],
    "TransformerEncoderLayer": [
        case(masked(fully_masked), 16, 4, 32, batch_first=True, **options)
        for options in (
            {}, {"activation": "gelu"}, {"norm_first": True}, {"bias": False},
            {"activation": nn.SiLU()},
        )
    ],
    "TripletMarginLoss": [case(lambda: (normal(4, 3), normal(4, 3), normal(4, 3)))],
    "TripletMarginWithDistanceLoss": [case(lambda: (normal(4, 3), normal(4, 3), normal(4, 3)))],
    "Unflatten": [case(lambda: normal(2, 4), 1, (2, 2))],
    "Unfold": [case(lambda: normal(2, 3, 4, 4), 2)],
    "Upsample": [
        case(lambda: normal(2, 3, 4, 4), scale_factor=2),
        case(lambda: normal(2, 3, 4, 4), scale_factor=1.5, mode="bicubic"),
    ],
    "UpsamplingBilinear2d": [case(lambda: normal(2, 3, 4, 4), scale_factor=2)],
    "UpsamplingNearest2d": [case(lambda: normal(2, 3, 4, 4), scale_factor=2)],
}  # fmt: skip


def module_classes() -> dict[str, type[nn.Module]]:
    members = inspect.getmembers(nn, inspect.isclass)
    return {name: cls for name, cls in members if issubclass(cls, nn.Module)}


def test_every_module_class_of_torch_has_a_case() -> None:
    assert module_classes().keys() - CASES.keys() - ABSTRACT == set()
    for name in ABSTRACT & module_classes().keys():
        assert name in ("RNNBase", "RNNCellBase") or not has_forward(getattr(nn, name)), name


def has_forward(cls: type[nn.Module]) -> bool:
    return cls.forward is not nn.Module.forward


class Holder(nn.Module):
    """Calls a module as a part of a model."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.part(*args, **kwargs)


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):  # packed sequences, too
        for item in value:
            yield from tensors_of(item)


def outcome(cls: type[nn.Module], case: Case, train: bool, grad: bool) -> Any:
    """Return everything that a module computes in two calls: alone, and as a part of a model."""
    seed()
    module = case.make(cls).train(train)
    seen: list[Any] = []
    for called in (module, Holder(module).train(train)):
        given = case.inputs()
        args = given if type(given) is tuple else (given,)
        args, kwargs = (args[:-1], args[-1]) if isinstance(args[-1], dict) else (args, {})
        floats = [x for x in tensors_of(args) if x.is_floating_point() and x.is_leaf]
        with torch.set_grad_enabled(grad):
            for x in floats:
                x.requires_grad_(grad)
            output = called(*args, **kwargs)
            results = [result for result in tensors_of(output) if result.requires_grad]
            if results:
                torch.autograd.backward([result.sum() for result in results])
        seen += [list(tensors_of(output)), [x.grad for x in floats], list(module.buffers())]
        seen += [(p.detach(), p.grad) for p in module.parameters()]
    return bits([seen, random_state()])


MODES = [(train, grad) for train in (True, False) for grad in (True, False)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted(CASES.keys() & module_classes().keys()))
def test_a_module_class_of_torch_is_bit_identical(name: str) -> None:
    cls = getattr(nn, name)
    for number, given in enumerate(CASES[name]):
        runs = [(cls, given, *mode) for mode in MODES]
        bare = [outcome(*run) for run in runs]
        with recording(capture=EVERYTHING, stats=ALL_STATS) as sink:
            recorded = [outcome(*run) for run in runs]
        assert sink.records
        for mode, before, after in zip(MODES, bare, recorded, strict=True):
            assert before == after, (name, number, mode)
