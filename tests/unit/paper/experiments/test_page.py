"""The pages of the results are written from the files of the results, and nothing else."""

import json
from pathlib import Path

import pytest

from bayesbackprop_paper.experiments import page
from repository import ROOT

pytestmark = pytest.mark.identities

BEGIN, END = "<!-- results: written by bbb reproduce page -->\n", "<!-- end of results -->"


def test_the_summary_goes_between_its_marks(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{BEGIN}old\n{END}\nafter\n")
    for _ in range(2):
        page.write_summary(ROOT / "results", readme)
        assert readme.read_text() == f"before\n{BEGIN}{page.summary(ROOT / 'results')}{END}\nafter\n"
    readme.write_text("no marks")
    with pytest.raises(ValueError, match="marks"):
        page.write_summary(ROOT / "results", readme)
    assert readme.read_text() == "no marks"


def test_the_summary_of_nothing_has_no_rows(tmp_path: Path) -> None:
    assert page.summary(tmp_path).count("\n") == 2


def test_the_summary_by_hand(tmp_path: Path) -> None:
    header = "method,units,temperature,seed,epochs,selected_epoch,validation_error,test_error,seconds,prediction\n"
    rows = ["bbb-mixture,400,1,0,60,3,1.5,1.4", "bbb-mixture,400,1,1,60,3,1.5,1.6", "sgd,400,1,0,40,3,1.5,9.9"]
    rows += ["bbb-mixture,800,0.1,0,9,3,1.5,1.2"]
    (tmp_path / "table1.csv").write_text(header + "".join(f"{row},9,mean\n" for row in rows))
    (tmp_path / "table2.csv").write_text(
        "units,seed,fraction,weights_left,test_error,file_bytes,latency_us\n"
        + "".join(
            f"1200,{seed},{fraction},9,{error + seed / 10},{size},{time}\n"
            for seed in (0, 2)
            for fraction, error, size, time in ((0, 1.0, 900, 60), (0.95, 1.1, 90, 9), (0.98, 1.2, 30, 10))
        )
    )
    (tmp_path / "table2.json").write_text(json.dumps({"1200 units": {"command": "bbb pruning"}}))
    (tmp_path / "fig6.csv").write_text(
        "agent,seed,step,regret\n"
        + "".join(
            f"{agent},{seed},{step},{step + 100 * seed}\n"
            for agent in ("bbb", "greedy", "epsilon-1", "epsilon-5")
            for seed in (0, 1)
            for step in (10, 2000)
        )
    )
    (tmp_path / "fig6.json").write_text(json.dumps({"command": "bbb this"}))
    (tmp_path / "bench").mkdir()
    step = {"units": 1200, "network": "a-b", "command": "bbb that"}
    names = {"sgd": 1.0, "bayesbackprop": 1.625, "BLiTZ": 7.04}
    entries = [{**step, "name": name, "ratio_sgd": ratio} for name, ratio in names.items()]
    (tmp_path / "bench" / "step.json").write_text(json.dumps([*entries, {**entries[2], "units": 400, "ratio_sgd": 99}]))
    assert page.summary(tmp_path).splitlines()[2:] == [
        "| a training step of a-b, in plain SGD steps | 1.62 | BLiTZ 7.0 | `bbb that` |",
        "| MNIST test error, 2x400/800/1200, the paper's cost, 60 epochs (2/0/0 seeds) | 1.50 / not run / not run % "
        "| paper 1.36 / 1.34 / 1.32 %, 600 epochs | `bbb reproduce table1 --method bbb-mixture` |",
        "| MNIST test error, 2x400/800/1200, complexity at temperature 0.1, 9 epochs (0/1/0 seeds) | not run / 1.20 / "
        "not run % | paper 1.36 / 1.34 / 1.32 %, 600 epochs "
        "| `bbb reproduce table1 --method bbb-mixture --temperature 0.1 --epochs 9` |",
        "| test error without 0 / 95 / 98 % of the weights of 2x1200 (2 seeds) | 1.10 / 1.20 / 1.30 %; at 98 % the "
        "file is 1/30 and a digit takes 1/6.0 | paper 1.24 / 1.29 / 1.39 % | `bbb pruning` |",
        "| mushroom bandit, regret after 2,000 steps (2 seeds, lowest to highest) | our default agent (temperature "
        "0.03, a linear regression beside the network) 2050 (2000 to 2100), greedy 2050 (2000 to 2100), 1 % greedy "
        "2050 (2000 to 2100), 5 % greedy 2050 (2000 to 2100) | paper 2000, 2277, 2528, 2826 | `bbb this` |",
    ]
