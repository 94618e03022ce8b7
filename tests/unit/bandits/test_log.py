"""A log of decisions: what it takes, what it refuses, and files of it."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor

from bayesbackprop.bandits import Decision, LinearThompson, Log, ThompsonSampling, Uniform, evaluate

pytestmark = pytest.mark.identities

GOOD: dict[str, Any] = {
    "contexts": [[0.1, 2.0], [0.3, -1e-7], [3.0, 1 / 3]],
    "actions": [0, 2, 1],
    "rewards": [1.0, 1 / 3, -2.0],
    "propensities": [0.5, 1.0, 0.1],
}
ALL = [[0.5, 0.5, 0.0], [0.0, 0.0, 1.0], [0.8, 0.1, 0.1]]
MASKS = [[True, True, False], [False, False, True], [True, True, True]]


def same(one: Log, other: Log) -> bool:
    names = ("contexts", "actions", "rewards", "propensities", "probabilities", "masks", "features")
    pairs = [(getattr(one, name), getattr(other, name)) for name in names]
    return all(a is b is None or np.array_equal(a, b, equal_nan=True) for a, b in pairs)


@pytest.mark.parametrize(
    "convert",
    [np.array, lambda each: torch.from_numpy(np.array(each)), list, lambda each: pd.DataFrame(each).squeeze(1)],
)
def test_a_log_is_the_same_however_it_is_given(convert: Any) -> None:
    log = Log(**{name: convert(value) for name, value in GOOD.items()}, masks=convert(MASKS))
    assert same(log, Log(**GOOD, masks=MASKS))
    assert [len(log), log.contexts.dtype, log.rewards.dtype] == [3, torch.float32, torch.float64]
    assert log.probabilities is None


def test_probabilities_of_every_action_say_that_of_the_one_taken() -> None:
    log = Log(**{**GOOD, "propensities": ALL})
    assert log.propensities.tolist() == GOOD["propensities"]
    assert log.probabilities is not None
    assert log.probabilities.tolist() == ALL


@pytest.mark.parametrize("propensities", [GOOD["propensities"], ALL])
@pytest.mark.parametrize("masks", [None, MASKS])
def test_files_give_back_what_was_written(tmp_path: Path, propensities: Any, masks: Any) -> None:
    given = {**GOOD, "propensities": propensities, "masks": masks}
    log = Log(**given)
    log.write_csv(tmp_path / "log.csv")
    assert same(Log.read_csv(tmp_path / "log.csv"), log)
    assert same(
        log[:2], Log(*(value[:2] for value in ({**GOOD, "propensities": propensities}).values()), masks and masks[:2])
    )


def test_a_file_can_be_read_by_people_and_have_more_columns(tmp_path: Path) -> None:
    Log(**GOOD).write_csv(tmp_path / "log.csv")
    lines = (tmp_path / "log.csv").read_text().splitlines()
    assert lines[:2] == ["context_0,context_1,action,reward,propensity", "0.1,2.0,0,1.0,0.5"]
    more = pd.read_csv(tmp_path / "log.csv").assign(time="noon")[
        ["time", "reward", "context_1", "context_0", "propensity", "action"]
    ]
    more.to_csv(tmp_path / "more.csv", index=False)
    assert same(Log.read_csv(tmp_path / "more.csv"), Log(**GOOD))


HEADER = "context_0,action,reward,propensity"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "it is empty"),
        ("\n\n", "it is empty"),
        ("a,b\n1,2\n", "it has no column context_0"),
        ("context_0,action,reward\n1,0,1\n", "it has no column propensity"),
        (f"{HEADER}\n1,0,1\n", "line 2 has not as many cells as the header"),
        (f"{HEADER}\n1,0,1,1\n\n1,0.5,1,1\n", "line 4 has '0.5' in the column action, which is no int"),
        (f"{HEADER}\n1,0,x,1\n", "line 2 has 'x' in the column reward, which is no float"),
        (f"{HEADER}\n1,0,1,1\n1,0,,1\n", "line 3 has no reward: leave out decisions .* without --waiting"),
        (f"{HEADER}\n1,0,nan,1\n", "'rewards' .* Got nan in row 0"),
        (f"{HEADER}\n", "it has no row below its header"),
        ("context_1,action,reward,propensity\n1,0,1,1\n", "it has no column context_0"),
        ("context_0,context_2,action,reward,propensity\n1,1,0,1,1\n", "it has no column context_1"),
        ("context_0,action,reward,propensity,allowed_0\n1,0,1,1,0\n", "'actions' .* its mask forbids"),
        ("context_0,action,reward,propensity,allowed_1\n1,0,1,1,0\n", "it has no column allowed_0"),
        ("context_0,action,reward,propensity,feature_0_0,feature_1_1\n1,0,1,1,1,1\n", "it has no column feature_0_1"),
        ("context_0,action,reward,propensity,feature_0_0\n1,0,1,1,x\n", "line 2 has 'x' in the column feature_0_0"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "log.csv").write_text(text)
    with pytest.raises(ValueError, match=r"'path' parameter of Log.read_csv must be .* Got .*log.csv: .*" + says):
        Log.read_csv(tmp_path / "log.csv")


def test_no_rows_are_no_log() -> None:
    with pytest.raises(ValueError, match=r"'rows' parameter of Log must be at least one of the 3 rows\. Got slice"):
        Log(**GOOD)[:0]
    with pytest.raises(ValueError, match=r"'contexts' parameter of Log must be numbers .*, and not empty"):
        Log(torch.empty(0, 3), [], [], [])


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"contexts": [0.1, 0.3, 3.0]}, "'contexts'"),
        ({"contexts": [[math.nan], [0.0], [1.0]]}, "'contexts'"),
        ({"contexts": [[1e300], [0.0], [1.0]]}, "'contexts'"),
        ({"actions": [0, 1]}, r"'actions' .* \[3\]"),
        ({"actions": [0.0, 1.0, 2.0]}, "'actions'"),
        ({"actions": [0, -1, 0]}, "'actions'"),
        ({"rewards": [1.0, 2.0]}, r"'rewards' .* \[3\]"),
        ({"rewards": [1.0, math.nan, 2.0]}, "'rewards' .* not known. Got nan in row 1"),
        ({"propensities": [0.5, 0.5, 0.0]}, r"'propensities' .* \(0, 1\] .* Got 0.0 in row 2"),
        ({"propensities": [0.5, 1.5, 0.5]}, "'propensities' .* Got 1.5 in row 1"),
        ({"propensities": [0.5, math.nan, 0.5]}, "'propensities' .* Got nan in row 1"),
        ({"propensities": [[0.5, 0.5]] * 3}, "'propensities' .* at least 3 actions"),
        ({"propensities": [[0.5, 0.5, 0.5]] * 3}, "'propensities' .* adds up to 1"),
        ({"propensities": [[1.0, 0.0, 0.0]] * 3}, "'propensities' .* Got 0.0 in row 1"),
        ({"masks": [[True, True]] * 3}, "'masks' .* at least 3 actions"),
        ({"masks": [[True, True, False]] * 3}, "'actions' .* Got action 2 in row 1, which its mask forbids"),
        ({"masks": [[0.5, 1, 1]] * 3}, "'masks' .* booleans"),
        (
            {"masks": MASKS, "propensities": [[0.4, 0.3, 0.3]] * 3},
            "'propensities' .* a mask forbids. .* row 0",
        ),
    ],
)
def test_what_is_no_log_is_refused(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Log(**{**GOOD, **wrong})


def test_a_log_knows_what_its_decisions_could_take() -> None:
    agent = Uniform(features=2, actions=3)
    agent.retire(1)
    made = [agent.decide(GOOD["contexts"][0], mask) for mask in (None, [True, True, False])]
    assert [each.allowed for each in made] == [(True, False, True), (True, False, False)]
    log = Log.of(made, GOOD["contexts"][:2], {each.id: 1.0 for each in made})
    assert log.masks is not None
    assert log.masks.tolist() == [[True, False, True], [True, False, False]]
    others = Log.of(made, GOOD["contexts"][:2], [1.0, 1.0], masks=[[True] * 3] * 2)
    assert others.masks is not None
    assert others.masks.all()


def test_a_log_of_decisions_without_a_mask_has_none() -> None:
    made = Uniform(features=2, actions=3).decide_many(GOOD["contexts"])
    assert Log.of(made, GOOD["contexts"], GOOD["rewards"]).masks is None
    assert Log.of(decisions(), GOOD["contexts"], GOOD["rewards"]).masks is None  # as older versions made them


def test_decisions_from_before_and_after_an_action_was_added_are_one_log() -> None:
    agent, contexts = Uniform(features=2, actions=2), torch.randn(4, 2)
    made = agent.decide_many(contexts[:2])
    agent.add_arms(2)
    made += agent.decide_many(contexts[2:])
    log = Log.of(made, contexts, [1.0] * 4)
    assert log.probabilities is not None
    assert log.probabilities.tolist() == [[0.5, 0.5, 0.0, 0.0]] * 2 + [[0.25] * 4] * 2
    assert log.masks is not None
    assert log.masks.tolist() == [[True, True, False, False]] * 2 + [[True] * 4] * 2
    parts = [Log.of(made[part], contexts[part], [1.0] * 2) for part in (slice(2), slice(2, 4))]
    assert same(parts[0] + parts[1], log)
    assert same(parts[1] + parts[0], log[[2, 3, 0, 1]])
    assert same(parts[0] + parts[0], log[[0, 1, 0, 1]]) is False
    assert (parts[0] + parts[0]).masks is None
    assert evaluate(agent, log, "ips").outside == 0
    with pytest.raises(ValueError, match=r"0 for actions that a mask forbids.* Got more for action 3 in row 0"):
        evaluate([3, 3, 3, 3], log)


def test_logs_that_know_as_much_are_added() -> None:
    log, masked = Log(**GOOD), Log(**GOOD, masks=MASKS)
    assert same((log + log)[:3], log)
    assert same((masked + masked)[3:], masked)
    with pytest.raises(ValueError, match="the same columns"):
        log + masked
    with pytest.raises(ValueError, match="the same columns"):
        Log(**{**GOOD, "propensities": ALL}) + log
    with pytest.raises(ValueError, match=r"'other' parameter .* contexts of 2 numbers.* Got 1"):
        log + Log([[0.0]], [0], [1.0], [1.0])
    with pytest.raises(TypeError):
        log + 1  # type: ignore[operator]


# --- features of the requests ----------------------------------------------------------------------------------------

# Of three requests, of which the second had none.
FEATURES: list[Any] = [[[1.0, 0.1], [2.0, 1 / 3], [3.0, 0.0]], None, [[0.0, 0.0], [1e-7, 2.0], [5.0, -1.0]]]


def described(actions: int = 3) -> ThompsonSampling:
    codes = torch.eye(actions, 2).tolist()
    return ThompsonSampling(2, actions, encoding="input", action_features=codes, hidden=[4], memory=10)


def test_files_and_parts_keep_the_features_of_requests(tmp_path: Path) -> None:
    log = Log(**{**GOOD, "propensities": ALL}, features=FEATURES)
    assert log.features is not None
    assert log.features.isnan().flatten(1).all(1).tolist() == [False, True, False]
    assert [None if row is None else row.tolist() for row in log.requested or []] == [
        None if row is None else torch.tensor(row).tolist() for row in FEATURES
    ]
    log.write_csv(tmp_path / "log.csv")
    assert same(Log.read_csv(tmp_path / "log.csv"), log)
    assert same(log[:2] + log[2:], log)
    assert log[1:2].features is None
    assert same(Log(**{**GOOD, "propensities": ALL}, features=log.requested), log)
    assert same(Log(**GOOD, features=[None] * 3), Log(**GOOD))


def test_a_log_of_decisions_has_the_features_by_which_they_were_made() -> None:
    agent = described()
    made = agent.decide_many(GOOD["contexts"], features=FEATURES)
    log = Log.of(made, GOOD["contexts"], GOOD["rewards"])
    assert same(log, Log.of(made, GOOD["contexts"], GOOD["rewards"], features=FEATURES))
    assert [each.features for each in made][1] is None
    agent.add_arms(1, features=[[1.0, 1.0]])
    made.append(agent.decide([0.0, 0.0], features=torch.ones(4, 2)))
    later = Log.of(made, [*GOOD["contexts"], [0.0, 0.0]], {made[0].id: 1.0, made[1].id: 2.0, made[3].id: 3.0})
    assert later.features is not None
    assert later.features.shape == (3, 4, 2)
    assert later.features[0, 3].tolist() == [0.0, 0.0]  # which was not there
    assert later.features[1].isnan().all()
    both = log + Log.of(made[3:], [[0.0, 0.0]], [3.0])
    assert both.features is not None
    assert torch.equal(both.features[[0, 1, 3]].nan_to_num(-1), later.features.nan_to_num(-1))


def test_an_agent_is_judged_and_taught_by_the_features_of_the_requests() -> None:
    """Its own describe the actions where a request had none, and where the log has none at all."""
    agent, contexts = described(), torch.randn(40, 2, generator=torch.Generator().manual_seed(0))
    features: list[Any] = torch.randn(40, 3, 2, generator=torch.Generator().manual_seed(1)).tolist()
    features[::4] = [None] * 10
    made = agent.decide_many(contexts, features=features)
    log = Log.of(made, contexts, [1.0] * 40)
    rows = [agent.explain(x, features=f).means for x, f in zip(contexts, features, strict=True)]
    together = [each.means for each in agent.explain_many(log.contexts, features=log.requested)]
    assert np.allclose(rows, together, rtol=1e-5, atol=1e-6)
    assert not np.allclose(rows, [each.means for each in agent.explain_many(contexts)], rtol=1e-3)
    probabilities = [each.probabilities for each in agent.explain_many(contexts, features=features)]
    assert evaluate(agent, log) == evaluate(probabilities, log)
    assert evaluate(LinearThompson(2, 3), log).decisions == 40  # which takes none

    def first(x: Tensor, masks: Tensor | None, numbers: Tensor) -> Tensor:
        assert masks is None
        assert numbers.shape == (40, 3, 2)
        return torch.zeros(len(x), dtype=torch.int64)

    assert evaluate(first, log) == evaluate([0] * 40, log)
    one, other = described(), described()
    one.warm_start(log.contexts, log.actions, log.rewards, log.requested)
    chosen = [
        (described()._codes if f is None else torch.tensor(f))[d.action] for f, d in zip(features, made, strict=True)
    ]
    other.warm_start(contexts, [each.action for each in made], [1.0] * 40, torch.stack(chosen))
    assert all(torch.equal(tensor, other.tensors()[name]) for name, tensor in one.tensors().items())


@pytest.mark.parametrize(
    "wrong",
    [
        FEATURES[:2],
        [row and row[:2] for row in FEATURES],
        [[[1.0]], [[1.0, 2.0]], None],
        [[[math.nan, 0.0]] * 3] * 3,
        [[[math.inf]] * 3] * 3,
        torch.ones(3, 4, 2),
        [[1.0]] * 3,
        "abc",
        [None],
    ],
)
def test_features_of_another_shape_are_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match="'features' parameter of Log must be"):
        Log(**{**GOOD, "propensities": ALL}, features=wrong)


def test_logs_of_other_features_are_not_added() -> None:
    one, other = (Log(**{**GOOD, "propensities": ALL}, features=torch.ones(3, 3, k)) for k in (1, 2))
    with pytest.raises(ValueError, match=r"'other' .* as many numbers .* Got 1 and 2"):
        one + other
    none = Log(**{**GOOD, "propensities": ALL})
    for both in (one + none, none + one):
        assert both.features is not None
        assert int(both.features.isnan().sum()) == 9


# --- logs of decisions -----------------------------------------------------------------------------------------------


def decisions() -> list[Decision]:
    chosen = zip("abc", GOOD["actions"], ALL, strict=True)
    unknown = (0.0, 0.0, 0.0)
    return [Decision(id, action, row[action], tuple(row), unknown, unknown, False) for id, action, row in chosen]


def test_a_log_of_decisions_and_their_rewards() -> None:
    whole = Log(**{**GOOD, "propensities": ALL}, masks=MASKS)
    assert same(Log.of(decisions(), GOOD["contexts"], GOOD["rewards"], MASKS), whole)
    by_id = {"c": -2.0, "z": 5.0, "a": 1.0}
    assert same(Log.of(decisions(), GOOD["contexts"], by_id, MASKS), whole[[0, 2]])


def test_decisions_and_rewards_must_be_as_many() -> None:
    with pytest.raises(ValueError, match="'contexts'"):
        Log.of(decisions(), GOOD["contexts"][:2], GOOD["rewards"])
    with pytest.raises(ValueError, match="'rewards'"):
        Log.of(decisions(), GOOD["contexts"], GOOD["rewards"][:2])
    with pytest.raises(ValueError, match="'contexts'"):  # none has come
        Log.of(decisions(), GOOD["contexts"], {})
    with pytest.raises(ValueError, match="'decisions'"):
        Log.of([1, 2, 3], GOOD["contexts"], GOOD["rewards"])
