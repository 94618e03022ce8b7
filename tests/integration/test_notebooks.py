"""The notebooks of docs run from top to bottom, and what their text says is so."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import nbformat
import pytest

from repository import ROOT

FOLDER = ROOT / "docs" / "notebooks"

# What the text of each claims, checked where its cells have run.
CLAIMS = {
    "classification": """
assert verdict.scores.accuracy > 0.95 and verdict.scores.ece < 0.05
assert min(each["entropy"].auroc for each in verdict.outside.values()) > 0.9
assert verdict.scores.error_at_95 < 1 - verdict.scores.accuracy
assert "nearly the same for all weights" in model.report((x[train], y[train]))
assert list(comparison.verdicts) == ["bayesbackprop", "plain", "deep ensemble", "MC dropout", "Laplace"]
assert abs(comparison.verdicts["bayesbackprop"].scores.nll - verdict.scores.nll) < 1e-3
assert all(abs(each.mean()) < 2 * errors[name] for name, each in differences.items())
assert max(each.scores.ece for each in comparison.verdicts.values()) < 0.02
strange = {name: each.outside["8 and 9"]["entropy"].auroc for name, each in comparison.verdicts.items()}
assert min(strange.values()) > 0.95
noticed = {name: each.outside["noise"]["entropy"].auroc for name, each in comparison.verdicts.items()}
assert max(noticed, key=noticed.get) == "bayesbackprop"
assert comparison.verdicts["deep ensemble"].outside["noise"]["epistemic"].auroc > noticed["bayesbackprop"]
assert noticed["plain"] <= noticed["Laplace"] < noticed["plain"] + 0.01
assert comparison.models["Laplace"].precision >= 1000
assert abs(comparison.verdicts["plain"].outside["noise"]["epistemic"].auroc - 0.5) < 1e-3
""",
    "regression": """
apart, joint = verdicts.values()
assert joint.outside["gap"]["epistemic"].auroc > 0.95 > 0.9 > apart.outside["gap"]["epistemic"].auroc
assert min(each.outside["outside"]["epistemic"].auroc for each in verdicts.values()) > 0.9
assert all(0.85 < each.scores.coverage_90 < 0.98 for each in verdicts.values())
""",
    "counts": """
few, right = verdicts.values()
assert few.scores.coverage_90 < 0.8 and 0.88 < right.scores.coverage_90 < 0.98
assert right.scores.nll < few.scores.nll - 0.2
assert abs(negative_binomial.likelihood.log_dispersion.exp().item() - 0.2) < 0.1
assert [column.kind for column in table.columns] == ["number", "number", "category"]
assert table.sentences[0].startswith("Worth it") and loaded.sentences == table.sentences
assert 0.88 < inside < 0.99 and by_hand.rmse < rmse < 1.1 * by_hand.rmse
assert predicted.equals(table.predict(table_of(*test)))
""",
    "bandits": """
assert all(abs(each.value - true[name]) < 3.5 * each.standard_error for name in found for each in found[name].values())
assert all(len(found[name]) == 3 and not found[name]["dr"].warnings for name in found)
assert blind.outside > 0.5 and len(blind.warnings) >= 3
assert all(0.9 < share / len(errors[estimator]) < 0.99 for estimator, share in held.items())
ips, snips, dr = (torch.tensor(each).std() for each in errors.values())
assert dr < snips < 0.5 * ips
""",
    "pretrained": """
before, longer, of_last, of_all = verdicts.values()
assert max(abs(each.scores.accuracy - before.scores.accuracy) for each in verdicts.values()) < 0.015
assert max(of_last.scores.nll, of_all.scores.nll) < before.scores.nll
assert min(of_last.scores.ece, of_all.scores.ece) > before.scores.ece
assert all(each.shifts[shift].nll < before.shifts[shift].nll for each in (of_last, of_all) for shift in shifts)
assert longer.shifts["noise"].nll > 1.1 * before.shifts["noise"].nll
assert edge(x) < 0.01 < 0.1 < edge(turned(x_test, 90))
assert angles[epistemic.index(max(epistemic))] == 30  # of the last model: all weights
assert confidence[3] < 0.82 < 0.95 < confidence[-1]
assert same > 0.97
""",
    "pruning": """
assert len(differences) == 4 and max(differences.values()) < 1e-5
assert max(by_mean[fraction] for fraction in (0.25, 0.5, 0.75)) < by_mean[0] + 0.004
assert by_mean[0.9] < by_mean[0] + 0.03
assert at_random[0.25] > by_mean[0.9] and by_mean[0.95] > 0.1
assert repaired < 0.05 and bbb.pruning.weights_left(trained) == bbb.pruning.weights_left(pruned[0.95])
assert size("posterior") > size("dense") > 6 * size("0.9")
assert size("0.98") < size("0.95") < size("0.9") < size("mean.onnx") < size("ensemble.onnx")
assert refused > 0.5
""",
    "lora": """
before, apart, joint = (figures[name] for name in ("before", "plain LoRA", "Bayesian LoRA"))
assert all(joint[measure] < apart[measure] for measure in ("error", "nll", "ece", "kl"))
assert joint["kl"] < 0.7 * apart["kl"] and apart["kl"] < before["kl"]
assert same and all("lora_" in name for name in model.posterior)
assert min(each["ece"] for each in figures.values()) == before["ece"] and before["kl"] > 1
assert all(mine < its for mine, its in zip(sure["Bayesian LoRA"], sure["plain LoRA"], strict=True))
assert all(mine > its for mine, its in zip(often["Bayesian LoRA"], often["plain LoRA"], strict=True))
assert surest["Bayesian LoRA"] < surest["plain LoRA"]
assert all(values[~known].mean() > values[known].mean() for values in measures.values())
assert max(detection, key=detection.get) == "Bayesian LoRA, epistemic part"
""",
}


@pytest.fixture(scope="module")
def notebooks() -> ModuleType:
    specification = importlib.util.spec_from_file_location("notebooks", ROOT / "docs" / "notebooks.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_every_notebook_is_tested_and_on_the_site() -> None:
    assert {path.stem for path in FOLDER.glob("*.ipynb")} == CLAIMS.keys()
    assert set(re.findall(r"notebooks/(\w+)\.md", (ROOT / "mkdocs.yml").read_text())) == CLAIMS.keys()


# The kernel is a process of its own, whose sockets jupyter_client may leave to the garbage collector.
@pytest.mark.learning
@pytest.mark.filterwarnings("default::ResourceWarning", "default::DeprecationWarning")
@pytest.mark.parametrize("name", CLAIMS)
def test_a_notebook_runs_and_says_what_is_so(notebooks: ModuleType, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    notebooks.run(FOLDER / f"{name}.ipynb", CLAIMS[name])


@pytest.mark.identities
@pytest.mark.parametrize("name", CLAIMS)
def test_a_notebook_was_kept_as_it_ran(notebooks: ModuleType, name: str) -> None:
    """Whole, in order, and without complaints: what the site shows."""
    cells = [cell for cell in nbformat.read(FOLDER / f"{name}.ipynb", as_version=4).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert not [output for cell in cells for output in cell.outputs if output.get("name") == "stderr"]
    text, pictures = notebooks.page(FOLDER / f"{name}.ipynb")
    assert len(pictures) >= 2
    assert all(content.startswith(b"\x89PNG") and f"]({file})" in text for file, content in pictures.items())
    assert "<Figure size" not in text  # a picture that was not shown
    assert "skipped:" not in text  # a method whose package was missing


@pytest.mark.identities
def test_a_page_has_all_that_a_notebook_shows(notebooks: ModuleType, tmp_path: Path) -> None:
    new = nbformat.v4
    code = new.new_code_cell("1 + 1", execution_count=1)
    code.outputs = [
        new.new_output("stream", text="said\n"),
        new.new_output("execute_result", {"text/plain": "2", "text/html": "<b>2</b>"}),
        new.new_output("display_data", {"text/plain": "<Figure>", "image/png": "aGVsbG8="}),
    ]
    nbformat.write(new.new_notebook(cells=[new.new_markdown_cell("# Title\n\ntext"), code]), tmp_path / "x.ipynb")
    text, pictures = notebooks.page(tmp_path / "x.ipynb")
    assert pictures == {"x-1.png": b"hello"}
    parts = ["# Title\n\ntext", "```py\n1 + 1\n```", "```text\nsaid\n```", "<b>2</b>", "![Title](x-1.png)"]
    assert text == "\n\n".join([*parts, "[This notebook](x.ipynb)"]) + "\n"


@pytest.mark.identities
def test_pages_are_those_of_the_notebooks(notebooks: ModuleType, tmp_path: Path) -> None:
    for name in ("gone.md", "gone-1.png"):
        (tmp_path / name).touch()
    (tmp_path / "counts.ipynb").write_bytes((FOLDER / "counts.ipynb").read_bytes())
    notebooks.write_pages(tmp_path)
    text, pictures = notebooks.page(FOLDER / "counts.ipynb")
    assert (tmp_path / "counts.md").read_text() == text
    assert {path.name: path.read_bytes() for path in tmp_path.glob("*.png")} == pictures
    assert not (tmp_path / "gone.md").exists()
