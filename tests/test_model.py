"""ECNN: exact parameter counts, equality with a loop over members, no such loop inside, refusals."""

from __future__ import annotations

import copy
import json
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from toys import WRONG_IMAGES, Counting, count, shake

from ecnn.backbones import ResidualUnit, Trunk
from ecnn.codes import CodeMatrix, load_code
from ecnn.constructions import random_code
from ecnn.errors import InputError
from ecnn.model import ECNN
from ecnn.objectives import MemberObjective, ScoreObjective, cross_member_entropy, member_entropy

CODE = random_code(4, 5, seed=0)
TERNARY = random_code(4, 5, arity=3, seed=0)
SMALL: dict[str, Any] = {"depth": 14, "width": 2}


def block(state: dict[str, Tensor], prefix: str, index: int, members: int) -> dict[str, Tensor]:
    """One member's share of the weights below a prefix: members lie side by side in the first axis."""
    return {
        name.removeprefix(prefix): values if values.ndim == 0 else values.chunk(members)[index]
        for name, values in state.items()
        if name.startswith(prefix)
    }


def loop_over_members(model: ECNN, images: Tensor) -> Tensor:
    """Member logits the slow way: each member's network built and run on its own."""
    config, members = model.config, model.code.code_length
    state = {name: values.detach() for name, values in model.state_dict().items()}
    options = {key: config[key] for key in ("depth", "width", "batch_norm", "activation")}
    act = {"relu": torch.relu, "silu": torch.nn.functional.silu}[config["activation"]]
    units = 3 * (config["depth"] - 2) // 6
    logits = []
    for index in range(members):
        single = Trunk(config["in_channels"], units - (config["branch"] != "linear"), **options)
        single.to(images.dtype)
        shared = {
            name.removeprefix("trunk."): values for name, values in state.items() if name.startswith("trunk.")
        }
        single.load_state_dict(shared if config["share_trunk"] else block(state, "trunk.", index, members))
        single.train(model.training)
        maps = single(images - state["centre.mean"])
        own = block(state, "branches.body.", index, members)
        if config["branch"] == "conv":
            maps = torch.conv2d(maps, own["conv.weight"], own["conv.bias"], padding=1)
            if config["batch_norm"]:
                maps = torch.batch_norm(
                    maps, own["norm.weight"], own["norm.bias"], own["norm.running_mean"],
                    own["norm.running_var"], model.training, 0.1, 1e-5, False,
                )  # fmt: skip
            maps = act(maps)
        elif config["branch"] == "residual":
            in_channels, out_channels = own["first.conv.weight"].shape[1::-1]
            unit = ResidualUnit(
                in_channels, out_channels, batch_norm=config["batch_norm"], activation=config["activation"]
            )
            unit.to(images.dtype).load_state_dict(own)
            maps = unit.train(model.training)(maps)
        features = maps.mean(dim=(2, 3))
        if config["branch"] != "linear":
            dense = features @ state["branches.dense.weight"][index] + state["branches.dense.bias"][index]
            features = act(dense)
        if config["share_head"]:
            logits.append(features @ state["head.weight"].T + state["head.bias"])
        else:
            logits.append(features @ state["head.weight"][index] + state["head.bias"][index])
    stacked = torch.stack(logits, dim=1)
    return stacked[:, :, 0] if config["member_output"] == "logit" else stacked


@pytest.mark.parametrize(
    ("name", "options", "parameters"),
    [
        ("10x10", {}, 294_977),
        ("10x15", {}, 343_857),
        ("10x20", {}, 392_737),
        ("10x25", {}, 441_617),
        ("10x30", {}, 490_497),
        ("10x30", {"in_channels": 1}, 490_209),
        ("10x30-q2", {"member_output": "symbols"}, 490_530),
        ("10x30-q3", {"member_output": "symbols"}, 490_563),
        ("10x30-q4", {"member_output": "symbols"}, 490_596),
        ("10x30", {"branch": "residual"}, 2_475_297),
        ("10x30", {"branch": "residual", "share_trunk": False, "share_head": False}, 8_194_590),
        ("10x30", {"share_trunk": False, "share_head": False}, 6_209_790),
        ("10x30", {"share_head": False}, 490_497 + 29 * 33),
        ("10x30", {"batch_norm": True}, 492_577),
        ("100x80", {}, 979_297),
        ("10x30", {"branch": "linear", "depth": 32, "activation": "silu", "batch_norm": True}, 469_246),
    ],
)
def test_parameter_counts(name: str, options: dict[str, Any], parameters: int) -> None:
    with torch.device("meta"):
        assert count(ECNN(load_code(name), **options)) == parameters


def test_parts_have_the_counts_of_the_paper() -> None:
    model = ECNN(load_code("10x30"))
    assert count(model.trunk) == 197_184
    assert count(model.branches) == 30 * 9_776
    assert count(model.head) == 33


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"batch_norm": True},
        {"share_head": False, "activation": "silu"},
        {"share_trunk": False, "share_head": False},
        {"share_trunk": False, "batch_norm": True},
        {"branch": "residual"},
        {"branch": "residual", "batch_norm": True, "share_head": False},
        {"branch": "residual", "share_trunk": False, "share_head": False, "batch_norm": True},
        {"branch": "linear"},
        {"branch": "linear", "share_trunk": False},
        {"branch": "linear", "share_trunk": False, "share_head": True, "batch_norm": True},
        {"member_output": "symbols"},
        {"member_output": "symbols", "share_head": False, "branch": "residual"},
        {"member_output": "symbols", "branch": "linear"},
    ],
)
def test_members_at_once_equal_a_loop_over_members(options: dict[str, Any], training: bool) -> None:
    torch.manual_seed(0)
    code = TERNARY if options.get("member_output") == "symbols" else CODE
    mean = torch.rand(3, 8, 8)
    model = ECNN(code, mean=mean, **SMALL, **options).double()
    shake(model)
    model.train(training)
    images = torch.rand(3, 3, 8, 8, dtype=torch.float64)
    expected = loop_over_members(copy.deepcopy(model), images)
    member_logits = model.member_logits(images)
    assert member_logits.shape == ((3, 5) if code is CODE else (3, 5, 3))
    torch.testing.assert_close(member_logits, expected, atol=1e-10, rtol=0)
    assert member_logits.std(dim=1).min() > 1e-6  # members differ, so a mix-up would show


def test_depth_8_gives_the_strided_unit_to_the_branches() -> None:
    model = ECNN(CODE, branch="residual", depth=8, width=2).double()
    images = torch.rand(2, 3, 8, 8, dtype=torch.float64)
    unit = model.branches.body
    assert isinstance(unit, ResidualUnit)
    single = ResidualUnit(4, 8, stride=2).double()
    single.load_state_dict(block(model.state_dict(), "branches.body.", 3, 5))
    maps = model.trunk(images)
    torch.testing.assert_close(unit(maps).chunk(5, dim=1)[3], single(maps), atol=1e-12, rtol=0)


@pytest.mark.parametrize("branch", ["conv", "residual", "linear"])
@pytest.mark.parametrize("share_trunk", [True, False])
def test_an_unshared_member_depends_only_on_its_own_weights(branch: Any, share_trunk: bool) -> None:
    torch.manual_seed(0)
    model = ECNN(CODE, branch=branch, share_trunk=share_trunk, share_head=False, **SMALL).double()
    logits = model.member_logits(torch.rand(2, 3, 8, 8, dtype=torch.float64))
    torch.autograd.backward(logits[:, 2].sum())
    for name, parameter in model.named_parameters():
        if share_trunk and name.startswith("trunk."):
            continue
        assert parameter.grad is not None
        used = [bool(piece.any()) for piece in parameter.grad.chunk(5)]
        assert used == [False, False, True, False, False], name


@pytest.mark.parametrize(
    "objective",
    [MemberObjective("cross_entropy", 0.1), MemberObjective(diversity="cross", diversity_weight=0.1)],
)
@pytest.mark.parametrize("branch", ["conv", "residual", "linear"])
@pytest.mark.parametrize("share_trunk", [True, False])
def test_no_loop_over_members(branch: Any, share_trunk: bool, objective: MemberObjective) -> None:
    calls = []
    for name in ("10x10", "10x30"):
        model = ECNN(load_code(name), branch=branch, share_trunk=share_trunk, share_head=False, **SMALL)
        images, labels = torch.rand(2, 3, 8, 8), torch.tensor([0, 1])
        with Counting() as counting:
            loss = objective(model, images, labels) + ScoreObjective()(model, images, labels)
            torch.autograd.backward(loss)
        calls.append(counting.calls)
    assert calls[0] == calls[1]
    # Neither a wait for a value nor a shape that depends on one: a CUDA graph could not hold it.
    assert not {
        call for call in calls[0] if any(word in call for word in ("_local_scalar", "nonzero", "item"))
    }
    # Stem, 6 units of 2 and 2 shortcuts; the last unit is the branches' or one convolution. Two forwards.
    assert calls[0]["aten.convolution.default"] == 2 * {"conv": 14, "residual": 15, "linear": 15}[branch]


@pytest.mark.parametrize("diversity", ["own", "cross"])
@pytest.mark.parametrize("output", ["logit", "symbols"])
def test_objectives_on_a_model(diversity: Any, output: Any) -> None:
    torch.manual_seed(0)
    code = CODE if output == "logit" else TERNARY
    model = ECNN(code, member_output=output, share_head=False, **SMALL).double()
    images, labels = torch.rand(6, 3, 8, 8, dtype=torch.float64), torch.arange(6) % 4
    objective = MemberObjective("cross_entropy", 0.3, entropy_unit="nats", diversity=diversity)
    plain = MemberObjective("cross_entropy")(model, images, labels)
    if diversity == "own":
        entropy = member_entropy(model.member_logits(images))
    else:
        weight, bias = model.head.weight, model.head.bias
        if output == "logit":
            weight, bias = weight[:, :, 0], bias[:, 0]  # type: ignore[index]
        entropy = cross_member_entropy(model.features(images), weight, bias)  # type: ignore[arg-type]
    torch.testing.assert_close(objective(model, images, labels), plain - 0.3 * entropy.mean())


def test_members_learn_their_tasks() -> None:
    """A few steps fit eight images; then every member answers its task and the decoder the class."""
    torch.manual_seed(0)
    model = ECNN(CODE, depth=8, width=4)
    images, labels = torch.rand(8, 3, 8, 8), torch.arange(8) % 4
    optimiser = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(120):
        optimiser.zero_grad()
        torch.autograd.backward(MemberObjective("hinge", 0.1)(model, images, labels))
        optimiser.step()
    answers = (model.member_logits(images) > 0).int()
    assert (answers.numpy() == CODE.symbols[labels.numpy()]).mean() == 1
    assert model(images).argmax(dim=1).tolist() == labels.tolist()


def test_forward_is_decode_of_member_logits() -> None:
    model = ECNN(CODE, **SMALL)
    images = torch.rand(3, 3, 8, 8)
    member_logits = model.member_logits(images)
    assert model.features(images).shape == (3, 5, 32)
    assert torch.equal(model(images), model.decode(member_logits))
    signs = torch.from_numpy(CODE.signed.copy()).float()
    torch.testing.assert_close(model(images), torch.tanh(member_logits) @ signs.T)


def test_linear_members_read_the_same_features() -> None:
    model = ECNN(CODE, branch="linear", **SMALL)
    features = model.features(torch.rand(3, 3, 8, 8))
    assert features.shape == (3, 5, 8)
    assert torch.equal(features[:, 0], features[:, 4])


def test_the_mean_is_subtracted_before_the_trunk() -> None:
    mean, images = torch.rand(3, 8, 8), torch.rand(2, 3, 8, 8)
    model = ECNN(CODE, mean=mean, **SMALL)
    bare = ECNN(CODE, **SMALL)
    bare.load_state_dict({**model.state_dict(), "centre.mean": torch.zeros(1, 1, 1)})
    torch.testing.assert_close(model(images), bare(images - mean))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"branch": "linear", "batch_norm": True},
        {"branch": "residual", "share_trunk": False, "decoder": "p_nu"},
    ],
)
def test_config_and_weights_bring_the_model_back(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = ECNN(CODE, mean=torch.rand(3, 8, 8), **SMALL, **options)
    shake(model)
    config = json.loads(json.dumps(model.config))
    assert "mean" not in config
    back = ECNN(CODE, **config)
    assert back.config == model.config
    back.load_state_dict(model.state_dict(), strict=True)
    images = torch.rand(2, 3, 8, 8)
    assert torch.equal(back.eval()(images), model.eval()(images))


def test_defaults_are_written_out_in_the_config() -> None:
    assert ECNN(CODE, **SMALL).config == {
        "in_channels": 3,
        "member_output": "logit",
        "branch": "conv",
        "batch_norm": False,
        "share_trunk": True,
        "share_head": True,
        "width": 2,
        "depth": 14,
        "feature_dim": 32,
        "activation": "relu",
        "decoder": "tanh",
    }
    assert ECNN(CODE, branch="linear", **SMALL).config["share_head"] is False
    assert ECNN(TERNARY, member_output="symbols", **SMALL).config["decoder"] == "sigmoid"


def test_deepcopy_and_functional_call() -> None:
    model = ECNN(CODE, batch_norm=True, **SMALL).eval()
    images = torch.rand(2, 3, 8, 8)
    twin = copy.deepcopy(model)
    assert twin.code == model.code
    assert torch.equal(twin(images), model(images))
    weights = {name: 0 * values for name, values in model.named_parameters()}
    scores = functional_call(model, weights, (images,))
    assert not scores.any()
    assert model(images).any()


@pytest.mark.parametrize("branch", ["conv", "residual"])
def test_memory_format_changes_nothing(branch: Any) -> None:
    model = ECNN(CODE, branch=branch, batch_norm=True, **SMALL).double().eval()
    images = torch.rand(2, 3, 8, 8, dtype=torch.float64)
    expected = model(images)
    last = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    torch.testing.assert_close(last(images.to(memory_format=torch.channels_last)), expected)


@pytest.mark.parametrize("output", ["logit", "symbols"])
def test_under_autocast_logits_and_scores_are_float32(output: Any) -> None:
    model = ECNN(CODE, member_output=output, **SMALL)
    images = torch.rand(2, 3, 8, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        member_logits, scores = model.member_logits(images), model(images)
    assert member_logits.dtype == scores.dtype == torch.float32
    assert torch.equal(model.decode(member_logits), scores)  # the decoder itself ran in float32
    torch.testing.assert_close(scores, model(images), atol=0.3, rtol=0)


def test_batch_norm_learns_only_in_training_mode() -> None:
    model = ECNN(CODE, batch_norm=True, **SMALL).eval()
    before = {name: values.clone() for name, values in model.named_buffers()}
    model(torch.rand(4, 3, 8, 8))
    assert all(torch.equal(values, before[name]) for name, values in model.named_buffers())
    model.train()(torch.rand(4, 3, 8, 8))
    name = "branches.body.norm.running_mean"
    assert not torch.equal(dict(model.named_buffers())[name], before[name])


def test_a_batch_row_is_a_batch_of_one() -> None:
    model = ECNN(CODE, batch_norm=True, **SMALL).double().eval()
    images = torch.rand(3, 3, 8, 8, dtype=torch.float64)
    torch.testing.assert_close(model(images)[1:2], model(images[1:2]))
    assert model(images[:0]).shape == (0, 4)


def test_a_thousand_classes_and_two_hundred_members() -> None:
    model = ECNN(random_code(1000, 200, seed=0), depth=8, width=2)
    optimiser = torch.optim.SGD(model.parameters(), 0.1)
    images, labels = torch.rand(2, 3, 8, 8), torch.tensor([3, 999])
    before = MemberObjective("cross_entropy")(model, images, labels)
    torch.autograd.backward(before)
    optimiser.step()
    assert MemberObjective("cross_entropy")(model, images, labels) < before
    assert model(images).shape == (2, 1000)


class Vectors(nn.Module):
    """A trunk that returns vectors, has batch norm and dropout, and draws a number whenever it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(12)
        self.drop = nn.Dropout(0.5)
        self.frozen = nn.BatchNorm1d(12).eval()

    def forward(self, images: Tensor) -> Tensor:
        torch.rand(1)
        pooled = images.mean(dim=(2, 3)).repeat(1, 4)
        result: Tensor = self.frozen(self.drop(self.norm(pooled)))
        return result


@pytest.mark.parametrize("branch", ["conv", "residual", "linear"])
def test_a_trunk_of_ones_own_is_measured_without_a_trace(branch: Any) -> None:
    trunk = Vectors().train()
    trunk.frozen.eval()
    statistics = {name: values.clone() for name, values in trunk.state_dict().items()}
    model = ECNN(CODE, branch=branch, trunk=trunk, width=2)
    assert trunk.training
    assert trunk.norm.training
    assert not trunk.frozen.training
    assert all(torch.equal(values, statistics[name]) for name, values in trunk.state_dict().items())
    assert model(torch.rand(3, 3, 8, 8)).shape == (3, 4)
    with pytest.raises(InputError, match="cannot be described by names"):
        _ = model.config


def test_measuring_a_trunk_draws_nothing() -> None:
    """The heads' weights are the same whether or not the trunk drew numbers while it was measured."""
    torch.manual_seed(3)
    first = ECNN(CODE, branch="linear", trunk=Vectors())
    torch.manual_seed(3)
    second = ECNN(CODE, branch="linear", trunk=nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten()))
    assert torch.equal(first.head.weight, second.head.weight)  # type: ignore[arg-type]


def test_a_trunk_of_ones_own_is_measured_at_the_size_of_the_mean() -> None:
    sizes = []

    class Watching(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            sizes.append(tuple(images.shape))
            return images

    ECNN(CODE, trunk=Watching(), mean=torch.zeros(3, 12, 10))
    ECNN(CODE, trunk=Watching(), mean=[0.1, 0.2, 0.3])
    assert sizes == [(2, 3, 12, 10), (2, 3, 32, 32)]


def test_a_map_trunk_equals_the_built_in_one() -> None:
    model = ECNN(CODE, **SMALL).double()
    own = ECNN(CODE, trunk=Trunk(3, 5, **SMALL), width=2).double()
    own.load_state_dict(model.state_dict())
    images = torch.rand(2, 3, 8, 8, dtype=torch.float64)
    assert torch.equal(own(images), model(images))


def test_timm_models_are_trunks() -> None:
    timm = pytest.importorskip("timm")
    trunk = timm.create_model("resnet10t", pretrained=False, num_classes=0, global_pool="")
    model = ECNN(CODE, trunk=trunk, width=2)
    assert model(torch.rand(2, 3, 32, 32)).shape == (2, 4)


class Pair(nn.Module):
    def forward(self, images: Tensor) -> list[Tensor]:
        return [images, images]


@pytest.mark.parametrize(
    ("code", "options", "sentence"),
    [
        (TERNARY, {}, 'arity 3: use member_output="symbols"'),
        (CODE, {"member_output": "bits"}, "member_output must be"),
        (CODE.symbols, {}, "must be a CodeMatrix, not ndarray"),
        ("10x30", {}, "must be a CodeMatrix, not str: try load_code"),
        (CODE, {"decoder": "sigmoid"}, "reads members with symbols output, not 'logit'"),
        (
            CODE,
            {"decoder": "tanh", "member_output": "symbols"},
            "reads members with logit output, not 'symbols'",
        ),
        (CODE, {"decoder": "vote"}, "decoder must be one of .*, not 'vote'"),
        (CODE, {"branch": "dense"}, "one of conv, residual, linear"),
        (CODE, {"branch": "linear", "share_head": True}, "all members would give the same answer"),
        (CODE, {"activation": "tanh"}, "activation must be one of .*, not 'tanh'"),
        (CODE, {"depth": 18}, "depth must be"),
        (CODE, {"in_channels": 0}, "in_channels must be"),
        (CODE, {"feature_dim": 1.5}, "feature_dim must be"),
        (CODE, {"mean": np.zeros(4)}, "mean has 4 channels, the images 3"),
        (CODE, {"trunk": nn.Identity(), "share_trunk": False}, "cannot be copied for each member"),
        (CODE, {"trunk": nn.Flatten(0)}, r"not a tensor of shape \(6144,\)"),
        (CODE, {"trunk": Pair()}, "not a list"),
        (CODE, {"trunk": nn.Linear(5, 5)}, r"fails on zeros of shape \(2, 3, 32, 32\)"),
        (CODE, {"trunk": len}, "must be a torch module"),
    ],
)
def test_what_cannot_be_built_is_refused(code: Any, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        ECNN(code, **{**SMALL, **options})


@pytest.mark.parametrize(("images", "sentence"), WRONG_IMAGES)
def test_images_are_checked_at_the_door(images: Tensor, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        ECNN(CODE, **SMALL)(images)


def test_a_code_with_equal_rows_still_builds() -> None:
    code = CodeMatrix([[0, 1], [0, 1], [1, 0]], allow_equal_rows=True)
    scores = ECNN(code, **SMALL)(torch.rand(2, 3, 8, 8))
    assert torch.equal(scores[:, 0], scores[:, 1])
