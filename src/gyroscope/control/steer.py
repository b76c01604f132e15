"""One optimizer for a whole model: hidden matrices turn by an angle, and AdamW steps everything else.

`steer` decides by what a parameter is for (`routing`), takes its defaults from one table (`presets`), and returns a
`Layca` over two optimizers that step as one (`joint`).
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, AdamW, Optimizer

from gyroscope.base import markup
from gyroscope.base.accepted import choice, flag, real
from gyroscope.control.joint import Group, Joint, Rule, main
from gyroscope.control.layca import Layca, check_group
from gyroscope.control.presets import HEAD_INPUTS, OTHERS, Norms, maker, preset
from gyroscope.control.roster import few, names_of
from gyroscope.control.routing import Role, Route, routes
from gyroscope.control.steering import Law
from gyroscope.control.torch_contract import Wrapper, as_group, check_whole
from gyroscope.errors import ControlError
from gyroscope.layers.class_names import ancestry
from gyroscope.layers.layer import Granularity, Layer
from gyroscope.layers.output_layer import features
from gyroscope.vectors.layout import is_sharded

Inner = str | Callable[..., Optimizer]

#: Optimizers of other libraries that set the length of each layer's step themselves.
_NORMALIZES = {"LARS", "Lars", "LARC", "LAMB", "Lamb", "NovoGrad", "Nero", "Fromage", "Hyperball", "MuonH", "AdamH"}

_INSTEAD = {
    "lr": "`rate` for matrices that turn (ρ = tan θ per step, whatever the network), and `others_lr` for all else",
    "weight_decay": (
        "nothing: the lasting effect of decay is to set how fast a matrix turns, and `rate` sets that. To turn it as "
        "fast as AdamW with decay does in the end, give rate=gyroscope.control.rates.from_decay(lr, weight_decay)"
    ),
}

#: Other names of these.
_OTHER_NAMES = {"learning_rate": "lr", "wd": "weight_decay"}

#: Options of torch's optimizers that one may look for among the arguments of `steer`.
_INNER_OPTIONS = {"betas", "eps", "momentum", "nesterov", "amsgrad", "fused", "foreach", "capturable", "ns_steps"}

_CONVOLUTIONS = ("conv", "conv_transpose")
#: The roles that can have a learning rate of their own.
_ROLES = [role for role in get_args(Role) if role != "tied head"]

#: The largest share of weights that Muon cannot step, where it is the default.
_UNFIT = 0.1
#: The fewest steps within which a layer may forget its direction, if gradients are independent.
_SHORTEST_MEMORY = 10.0


def steer(
    model: nn.Module,
    inner: Inner | None = None,
    *,
    rate: float | Tensor | None = None,
    others_lr: float | Mapping[str, float] | None = None,
    embeddings: Rule = "plain",
    heads: Rule = "plain",
    norms: Norms | None = None,
    plain: str | Iterable[str] = (),
    granularity: Granularity = "expert",
    project: bool | None = None,
    nonfinite: Literal["skip", "raise"] = "skip",
    reads_weights: bool | None = None,
    inner_options: Mapping[str, Any] | None = None,
    others_options: Mapping[str, Any] | None = None,
    **rejected: Any,
) -> Steered:
    """Return one optimizer for the whole model, whose matrices turn by arctan ρ in each step.

    | parameters | step |
    |---|---|
    | hidden matrices | turn by arctan ρ in the direction of the inner optimizer (`gyroscope.Layca`) |
    | gains, biases, routers, tables that are added | AdamW at `others_lr`, without weight decay |
    | embeddings, output head | by choice: "turn", "plain" (AdamW at `others_lr`), or "frozen" |

    What is left out comes from the preset of `inner` (`gyroscope.control.presets`). `print` shows what was decided. The
    `lr` of every group is ρ, also of those that are stepped plainly, whose learning rate keeps its ratio to ρ: any
    scheduler acts on all of them in proportion. Parameters that need no gradient are left out.

    The norm of a matrix that turns is held, or learned: with d = ⟨∇, w⟩ and its running means m, v of d and d²,

        ln‖w‖ ← ln‖w‖ − ρ m̂/(√v̂ + 10⁻⁴ ‖∇‖‖w‖)

    A matrix that begins at zero (B of LoRA) has no direction. With its first gradient it takes a plain step, of length
    η√n with η = `others_lr` and n its number of elements; from then on it turns.

    A step of AdamW changes each weight of the head by its learning rate, and so a logit by up to as much times the
    number of inputs of the head. So the presets' `others_lr` is 0.01, and 1.28/n for a head of n > 128 inputs. With
    "adamw", ρ too is lower then, by (128/n)^(3/4).

    Args:
        model: the model.
        inner: "adamw", "sgd" or "muon"; "adamh" or "muonh" (Hyperball, without operation 1); or a function that takes a
            list of parameter groups (and `inner_options`) and returns an optimizer, such as `torch.optim.NAdam`. The
            rates of `torch.optim.SGD` and `Muon` are those of "sgd" and "muon"; other functions have those of "adamw".
            By default "sgd" if most of the layers that turn are convolutions; else "muon" if it can step all of them,
            or all but some hidden ones with a tenth of the weights or less, which are then stepped plainly, such as a
            convolution that embeds patches; else "adamw". Muon takes matrices of two dimensions, under FSDP2 with at
            least as many rows as ranks.
        rate: ρ = tan θ of a step, by default the preset's. If it is a tensor on the GPU, which becomes the `lr` of
            every group, a CUDA graph can capture the steps.
        others_lr: the learning rate of all that is stepped plainly, or a dict of learning rates by role: "head",
            "embedding", "router", "other" (gains, biases and the like) and "matrix" (those of `plain`, and matrices
            that begin at zero). Other roles keep the preset's.
        embeddings: the rule of embeddings, also of positions.
        heads: the rule of the output head, also if it is tied to an embedding.
        norms: "learned", or "held" at what they were at the first step.
        plain: names of layers, or glob patterns on them, to step plainly.
        granularity: the parts of a layer that turn, as in `gyroscope.layers`: by default each expert of a mixture.
        project: whether to perform operation 1 of Layca.
        nonfinite, reads_weights: as in `gyroscope.Layca`.
        inner_options: options of the inner optimizer, such as `betas` or `momentum`; not `lr` and `weight_decay`.
        others_options: options of the AdamW that steps the other parameters, such as `capturable`.

    Example:
        >>> import torch, gyroscope
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> optimizer = gyroscope.steer(model)
        >>> print(optimizer)
        Steered: Layca over Muon turns 1 matrix; AdamW steps 3 other parameters.
        Each step turns a layer by arctan ρ; its norm is learned.
        parameters  shape  role    rule   rate
        0.weight    8 × 4  matrix  turn   ρ = 0.04 (2.3°)
        2.weight    2 × 8  head    plain  lr = 0.01
        0.bias      8      other   plain  lr = 0.01
        2.bias      2      other   plain  lr = 0.01
        >>> schedule = gyroscope.control.rates.cosine(optimizer, steps=1000)
    """
    for name in rejected:
        instead = _INSTEAD.get(_OTHER_NAMES.get(name, name))
        if instead is None:
            hint = " Options of the inner optimizer go into `inner_options`, a dict." if name in _INNER_OPTIONS else ""
            raise TypeError(f"steer() got an unexpected keyword argument {name!r}.{hint}")
        raise ControlError(f"`{name}` is not an argument of steer, got {rejected[name]!r}. Give {instead}.")
    choice(embeddings, "embeddings", get_args(Rule), ControlError)
    choice(heads, "heads", get_args(Rule), ControlError)
    choice(granularity, "granularity", get_args(Granularity), ControlError)
    routed = routes(model, embeddings=embeddings, heads=heads, plain=plain, granularity=granularity)
    turning = [route for route in routed if route.rule == "turn"]
    if not turning:
        without = routes(model, embeddings=embeddings, heads=heads, granularity=granularity)
        raise ControlError(_why_nothing_turns(routed, [route.name for route in without if route.rule == "turn"]))
    _check_dense(routed)
    if inner is None:
        inner = _suited(turning)
        if inner == "muon":
            routed = [_plain_unless_for_muon(route) for route in routed]
            turning = [route for route in routed if route.rule == "turn"]
    named = isinstance(inner, str) or not callable(inner)
    chosen = preset(inner if named else _alike(inner))
    wider = _wider(routed)
    its_rate = chosen.rate / wider**chosen.falls
    given = its_rate if rate is None else rate
    rate = _checked("rate", given, its_rate)
    lr = given if isinstance(given, Tensor) else rate
    rates = _others_lr(others_lr, chosen.others_lr / wider, routed)
    norms = chosen.norms if norms is None else norms
    choice(norms, "norms", get_args(Norms), ControlError)
    project = chosen.project if project is None else flag(project, "project", ControlError)
    on_gpu = {"capturable": True} if isinstance(lr, Tensor) and lr.is_cuda else {}
    its_own = {**chosen.options, **(on_gpu if chosen.inner == "AdamW" else {})} if named else {}
    options = {**its_own, **_checked_options("inner_options", inner_options)}
    others_options = {**OTHERS, **on_gpu, **_checked_options("others_options", others_options)}
    relative = {role: one / rate for role, one in rates.items()}
    groups = _groups(routed, lr, relative)
    its = _made(maker(chosen) if named else inner, groups["turn"], options, turning)
    plainly = _with_options(AdamW, groups["plain"] or [{"params": []}], {"weight_decay": 0.0, **others_options})
    its.defaults["lr"] = plainly.defaults["lr"] = lr  # of groups that are added later
    joint = Joint(its, plainly, [*its.param_groups, *groups["plain"], *groups["frozen"]])
    _warn_beyond(rate, its.param_groups[0])
    turned = [route.layer for route in turning if route.layer is not None]
    law: dict[str, Any] = {"project": project, "nonfinite": nonfinite, "reads_weights": reads_weights}
    return Steered(joint, turned, relative, learns=norms == "learned", **law)


class Steered(Layca):
    """Layca over two optimizers that step as one, for the whole of a model; made by `steer`.

    Everything that a `Layca` can do, it can: `rates()`, `skipped()`, `multipliers`, checkpoints. Its groups have two
    keys more: `rule` ("turn", "plain" or "frozen") and `role` (what the parameters are for). The learning rate of a
    group that is stepped plainly is `lr` times its `relative_lr`.

    >>> import torch, gyroscope
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> optimizer = gyroscope.steer(model)
    >>> isinstance(optimizer, Steered), [(group["rule"], group["role"]) for group in optimizer.param_groups][0]
    (True, ('turn', 'matrix'))
    """

    def __init__(
        self, joint: Joint, layers: Sequence[Layer], relative_lr: Mapping[str, float], *, learns: bool, **options: Any
    ) -> None:
        super().__init__(joint, layers, **options)
        self._relative_lr = relative_lr["other"]  # of parameters that are added later
        self._steering.grows = relative_lr["matrix"]
        self._steering.learns = learns

    def _needs_closure(self) -> bool:
        return False  # because norms are learned from the gradients

    def add_param_group(self, param_group: Group) -> None:
        """Add parameters: those of two or more dimensions turn, the others are stepped plainly.

        Both have the rate ρ of the group, by default that with which the optimizer was built.
        """
        group = as_group(param_group)
        one_by_one = [one if isinstance(one, tuple) else (None, one) for one in group.pop("params")]
        held = {id(p) for own in self.param_groups for p in own["params"]}
        if any(id(p) in held for _, p in one_by_one) or len({id(p) for _, p in one_by_one}) < len(one_by_one):
            raise ControlError(
                "The group has parameters that it or another group has already; nothing was changed. Give every "
                "parameter once."
            )
        start = len(self.param_groups)
        named = [(f"group{start}.{j}" if name is None else name, p) for j, (name, p) in enumerate(one_by_one)]
        matrices = [(name, p) for name, p in named if isinstance(p, Tensor) and p.dim() >= 2]
        for name, p in named:
            if isinstance(p, Tensor) and not (p.is_leaf or p.retains_grad):
                raise ControlError(
                    f"Parameter {name} must be a leaf, such as a torch.nn.Parameter, got the result of an operation; "
                    "nothing was changed."
                )
        check_group(matrices, group.get("lr", self.defaults["lr"]))
        _check_muon(main(self.inner), matrices)
        rest = [(name, p) for name, p in named if not isinstance(p, Tensor) or p.dim() < 2]
        if rest:
            mine = {"rule": "plain", "role": "other", "relative_lr": self._relative_lr}
            super().add_param_group({**group, **mine, "params": rest})
        if matrices:
            super().add_param_group({**group, "rule": "turn", "role": "matrix", "params": matrices})

    def _load(self, state_dict: dict[str, Any]) -> None:
        check_whole(state_dict)
        theirs = [group.get("rule") for group in state_dict["param_groups"]]
        mine = [group["rule"] for group in self.param_groups]
        if theirs != mine:
            raise ControlError(
                f"The rules of the state's groups are {theirs}, and here they are {mine}. Steer the model as it was "
                "when the state was saved: with the same `inner`, `embeddings`, `heads` and `plain`."
            )
        kept = [state_dict["state"].get(key, {}) for group in state_dict["param_groups"] for key in group["params"]]
        learned = any("norm_moments" in one for one in kept)
        if learned != self._steering.learns and any("radius" in one for one in kept):
            was, here = ("learned", "held") if learned else ("held", "learned")
            raise ControlError(
                f"The norms of the state are {was}, and here they are {here}. Steer the model as it was when the state "
                f"was saved: with the same `inner`, and norms={was!r}."
            )
        super()._load(state_dict)

    def __repr__(self) -> str:
        said, heads, rows = self._shown()
        shown = rows if len(rows) <= markup.FIRST + markup.LAST else [*rows[: markup.FIRST], *rows[-markup.LAST :]]
        widths = [max(len(row[i]) for row in [heads, *shown]) for i in range(len(heads))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (heads, *shown)
        ]
        if len(shown) < len(rows):
            lines.insert(markup.FIRST + 1, f"… {len(rows) - len(shown):,} more …")
        return "\n".join([f"{type(self).__name__}: {said[0]}", *said[1:], *(line.rstrip() for line in lines)])

    def _shown(self) -> tuple[list[str], list[str], list[list[str]]]:
        heads = ["parameters", "shape", "role", "rule", "rate"]
        collapsed: dict[tuple[str, ...], list[str]] = {}
        counts = dict.fromkeys(get_args(Rule), 0)
        segments = {id(self.param_groups[g]["params"][j]): e.segments for g, j, e in self._roster.places()}
        for g, group in enumerate(self.param_groups):
            counts[group["rule"]] += len(group["params"])
            for name, p in zip(names_of(group, g), group["params"], strict=True):
                like = re.sub(r"(?<![^.])\d+(?=\.)", "*", name)
                shape, rule = " × ".join(map(str, p.shape)) or "1", group["rule"]
                if (parts := segments.get(id(p), 1)) > 1:
                    rule += f", {parts} parts"
                key = (like, shape, group["role"], rule, self._said_rate(group))
                collapsed.setdefault(key, []).append(name)
        rows = [
            [names[0] if len(names) == 1 else f"{key[0]} ({len(names)})", *key[1:]] for key, names in collapsed.items()
        ]
        law = self.law.said()
        if self._steering.learns:
            law = law.partition("; " if "; " in law else ", and ")[0] + "; its norm is learned."
        return [self._said_of_rules(counts), law], heads, rows

    def _said_rate(self, group: Group) -> str:
        lr = float(group["lr"])
        if group["rule"] == "turn":
            return f"ρ = {lr:.3g}" + (f" ({math.degrees(math.atan(lr)):.2g}°)" if self.law == Law() else "")
        return f"lr = {lr * group['relative_lr']:.3g}" if group["rule"] == "plain" else "–"

    def _said_of_rules(self, counts: Mapping[str, int]) -> str:
        turn, plain, frozen = (counts[rule] for rule in get_args(Rule))
        inner = type(main(self.inner)).__name__
        said = f"Layca over {inner} turns {turn} {'matrix' if turn == 1 else 'matrices'}"
        said += f"; AdamW steps {plain} other parameter{'s' * (plain != 1)}" if plain else ""
        return said + (
            f"; {frozen} stay{'s' * (frozen == 1)} as {'it is' if frozen == 1 else 'they are'}." if frozen else "."
        )


def _suited(turning: Sequence[Route]) -> str:
    """Return the name of the preset for the layers that turn, by the kind of most of them."""
    convolutions = sum(route.layer is not None and route.layer.kind in _CONVOLUTIONS for route in turning)
    if 2 * convolutions > len(turning):
        return "sgd"
    unfit = [route for route in turning if _not_for_muon(route.parameter)]
    # What the caller wants to turn, a head or an embedding, is not stepped plainly instead.
    asked = any(route.role != "matrix" for route in unfit)
    few_weights = _weights(unfit) <= _UNFIT * _weights(turning)
    return "muon" if few_weights and not asked else "adamw"


def _weights(routed: Iterable[Route]) -> int:
    return sum(route.parameter.numel() for route in routed)


def _plain_unless_for_muon(route: Route) -> Route:
    return replace(route, rule="plain") if route.rule == "turn" and _not_for_muon(route.parameter) else route


def _alike(make: Any) -> str:
    """Return the name of the preset whose rates a function that makes an optimizer is given."""
    return next((name for name in ("sgd", "muon") if make is maker(preset(name))), "adamw")


def _checked(name: str, given: Any, fine: float) -> float:
    if not 0 < real(given) < math.inf:
        raise ControlError(f"`{name}` must be a finite number > 0, got {given!r}. Try {fine:.3g}.")
    return real(given)


def _wider(routed: Sequence[Route]) -> float:
    """Return how many times more inputs than `HEAD_INPUTS` the head has; 1 if it has fewer."""
    inputs = [_inputs(one.layer) for one in routed if one.layer is not None and "head" in one.role]
    return max(HEAD_INPUTS, *inputs, 0) / HEAD_INPUTS


def _others_lr(given: Any, fine: float, routed: Sequence[Route]) -> dict[str, float]:
    """Return the learning rate of each role, if it is stepped plainly; `fine` is the default."""
    if given is not None and not isinstance(given, Mapping):
        return dict.fromkeys(_ROLES, _checked("others_lr", given, fine))
    rates = dict.fromkeys(_ROLES, fine)
    there = {"matrix", "other", *(_plain_role(one.role) for one in routed if one.rule == "plain")}
    for role, rate in (given or {}).items():
        if _plain_role(role) not in there:
            known = ", ".join(map(repr, sorted(there)))
            raise ControlError(f"`others_lr` must have roles that are stepped plainly (here {known}), got {role!r}.")
        rates[_plain_role(role)] = _checked(f"others_lr[{role!r}]", rate, fine)
    return rates


def _inputs(layer: Layer) -> int:
    return layer.parameter.shape[1:].numel() if layer.kind in _CONVOLUTIONS else features(layer)


def _plain_role(role: Any) -> Any:
    """Return the role whose learning rate a parameter has: a head that is tied to an embedding is a head."""
    return "head" if role == "tied head" else role


def _checked_options(name: str, given: Any) -> dict[str, Any]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise ControlError(f'`{name}` must be a dict, got a {type(given).__name__}. Try {{"eps": 1e-7}}.')
    for key in _INSTEAD.keys() & given.keys():
        raise ControlError(f"`{name}` must not have {key!r}, got {given[key]!r}. Give {_INSTEAD[key]}.")
    return dict(given)


def _why_nothing_turns(routed: Sequence[Route], named: Sequence[str]) -> str:
    """Return why no matrix turns; without `plain`, those `named` would."""
    if named:
        return f"No matrix of the model turns, because `plain` names all that would: {few(named)}. Name fewer of them."
    found = [f"{route.name} ({route.role})" for route in routed if route.layer is not None]
    if found:
        return (
            f"No matrix of the model turns; its matrices are stepped plainly or frozen: {few(found)}. Let them turn "
            'with heads="turn" or embeddings="turn", or use torch.optim.AdamW.'
        )
    what = f"its {len(routed)} parameters that need a gradient are vectors" if routed else "none needs a gradient"
    return f"The model has no matrix to turn: {what}. Use torch.optim.AdamW, or call requires_grad_() on its layers."


def _check_dense(routed: Sequence[Route]) -> None:
    """Reject embeddings with sparse gradients, which neither Layca nor AdamW can step."""
    sparse = [
        route.name
        for route in routed
        if route.rule != "frozen" and route.layer is not None and getattr(route.layer.module, "sparse", False) is True
    ]
    if sparse:
        raise ControlError(
            f"These embeddings have sparse gradients, which AdamW does not step: {few(sparse)}. Build them with "
            'sparse=False, or use embeddings="frozen".'
        )


def _groups(routed: Sequence[Route], rate: float | Tensor, relative_lr: Mapping[str, float]) -> dict[str, list[Group]]:
    """Return the groups of each rule, one per role."""
    found: dict[tuple[str, str], Group] = {}
    for route in routed:
        own: Group = {"params": [], "lr": rate, "rule": route.rule, "role": route.role}
        if route.rule == "plain":
            own["relative_lr"] = relative_lr[_plain_role(route.role)]
        found.setdefault((route.rule, route.role), own)["params"].append((route.name, route.parameter))
    return {rule: [group for (its, _), group in found.items() if its == rule] for rule in get_args(Rule)}


def _made(make: Any, groups: list[Group], options: dict[str, Any], turning: Sequence[Route]) -> Optimizer:
    """Return the inner optimizer over the groups that turn, without weight decay."""
    _check_muon(make, [(route.name, route.parameter) for route in turning])
    rates = [group["lr"] for group in groups]
    made = _with_options(make, groups, options)
    if not isinstance(made, Optimizer):
        raise ControlError(
            f"`inner` must return a torch.optim.Optimizer, got a {type(made).__name__}. Try torch.optim.NAdam."
        )
    name = type(made).__name__
    if (isinstance(made, Wrapper) and made.sets_lengths) or _NORMALIZES & set(ancestry(made)):
        raise ControlError(
            f"`inner` must propose steps and leave their length to Layca, got {name}, which normalizes them. Give "
            'the optimizer whose direction it takes, such as "sgd" or "adamw".'
        )
    if isinstance(made, LBFGS) or type(made).state_dict is not Optimizer.state_dict:
        raise ControlError(
            f"`inner` must step from one gradient and keep its state as torch's optimizers do; {name} does not. Wrap "
            "it yourself: gyroscope.Layca(optimizer, model)."
        )
    if [len(group["params"]) for group in made.param_groups] != [len(group["params"]) for group in groups]:
        raise ControlError(
            f"`inner` must return an optimizer over the groups that it is given, got {name} over others. Try "
            "lambda groups: torch.optim.NAdam(groups)."
        )
    for group, given, rate in zip(made.param_groups, groups, rates, strict=True):
        group |= {"lr": rate, "rule": given["rule"], "role": given["role"]}
        if "weight_decay" in group:
            group["weight_decay"] = 0.0
    made.defaults |= {"weight_decay": 0.0} if "weight_decay" in made.defaults else {}
    return made


def _with_options(make: Any, groups: list[Group], options: dict[str, Any]) -> Any:
    try:
        return make(groups, **options)
    except (TypeError, ValueError) as error:
        name = getattr(make, "__name__", repr(make))
        if not options:
            raise ControlError(
                f"`inner` must be a function of a list of parameter groups, such as torch.optim.NAdam; {name} failed "
                f"on them ({error})."
            ) from error
        raise ControlError(
            f"{name} could not be made with the options {options} ({error}). Give options that it knows."
        ) from error


def _check_muon(make: Any, weights: Sequence[tuple[str, Tensor]]) -> None:
    """Reject weights that Muon cannot orthogonalize: vectors, convolutions, experts in one tensor, too few rows."""
    if make is not torch.optim.Muon and not isinstance(make, torch.optim.Muon):
        return
    wrong = [f"{name} ({why})" for name, p in weights if (why := _not_for_muon(p))]
    if wrong:
        raise ControlError(
            "Muon orthogonalizes weights of two dimensions, with at least as many rows as ranks, got "
            f'{few(wrong)}. Step them plainly with plain="NAME", or use inner="adamw", which takes any.'
        )


def _not_for_muon(weight: Tensor) -> str:
    """Return why Muon cannot step a weight; empty if it can."""
    if weight.dim() != 2:
        return f"{weight.dim()} dimensions"
    placed: Any = weight
    where = enumerate(placed.placements) if is_sharded(weight) else ()
    ranks = math.prod(placed.device_mesh.size(i) for i, placement in where if placement.is_shard())
    return f"{' × '.join(map(str, weight.shape))} on {ranks} ranks" if weight.shape[0] < ranks else ""


def _warn_beyond(rate: float, group: Group) -> None:
    """Warn about a rate at which a layer forgets its direction within a few steps, if gradients are independent."""
    beta = real(group["betas"][0] if "betas" in group else group.get("momentum", 0.0))
    faster = (1 + beta) / (1 - beta) if 0 <= beta < 1 else 1.0
    memory = 2 / (rate * rate * faster)
    if memory < _SHORTEST_MEMORY:
        most = math.sqrt(2 / (_SHORTEST_MEMORY * faster))
        warnings.warn(
            f"`rate` {rate:.3g} is beyond the stable range: with a momentum of {beta:g} a layer forgets its direction "
            f"within {memory:.2g} steps. Stay below {most:.2g}; the presets have 0.028 for AdamW, "
            "0.04 for Muon, and 3**-3 for SGD.",
            stacklevel=3,
        )
