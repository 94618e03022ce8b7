"""The scripts of examples/ run as a user runs them, and what they print is what their page says of them."""

import importlib
import os
import re
import runpy
import subprocess
import sys
import textwrap
import traceback
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from processes import run_script
from repository import ROOT

pytestmark = pytest.mark.learning

SCRIPTS = sorted((ROOT / "examples").glob("*.py"))
PAGE = (ROOT / "docs" / "with_pytorch.md").read_text()


BF16 = ["--precision", "bf16-mixed", "--accumulate", "2"]
HALF = ["--precision", "bf16", "--accumulate", "2"]
LORA = ["--bf16", "--accumulate", "2"]
# Of each: the name of the run, the script, its arguments, and what becomes of a warning.
RUNS = [
    ("plain", "plain_pytorch.py", ["--seed", "0"], "error"),
    ("plain, seed 1", "plain_pytorch.py", ["--seed", "1"], "error"),
    # Lightning itself warns, of what torch will change.
    ("whole", "lightning_module.py", ["--folder", "whole"], "default"),
    ("stopped", "lightning_module.py", ["--folder", "parts", "--epochs", "10"], "default"),
    ("resumed", "lightning_module.py", ["--folder", "parts"], "default"),
    *(
        (f"lightning bf16 {name}", "lightning_module.py", ["--folder", f"bf16-{name}", *BF16, *more], "default")
        for name, more in (("whole", ["--epochs", "4"]), ("parts", ["--epochs", "2"]))
    ),
    ("lightning bf16 resumed", "lightning_module.py", ["--folder", "bf16-parts", *BF16, "--epochs", "4"], "default"),
    ("accelerate whole", "accelerate_loop.py", ["--folder", "whole", *HALF], "default"),
    ("accelerate stopped", "accelerate_loop.py", ["--folder", "parts", *HALF, "--epochs", "10"], "default"),
    ("accelerate resumed", "accelerate_loop.py", ["--folder", "parts", *HALF], "default"),
    ("lora whole", "lora_trainer.py", ["--folder", "whole", *LORA, "--epochs", "4"], "default"),
    ("lora stopped", "lora_trainer.py", ["--folder", "parts", *LORA, "--epochs", "2"], "default"),
    ("lora resumed", "lora_trainer.py", ["--folder", "parts", *LORA, "--epochs", "4"], "default"),
    ("hugging face", "hugging_face.py", ["--seed", "0"], "error"),
    ("hugging face again", "hugging_face.py", ["--seed", "0"], "error"),
    ("pretrained", "pretrained.py", ["--seed", "0"], "error"),
    ("pretrained again", "pretrained.py", ["--seed", "0"], "error"),
]
OFFLINE = {"HF_HUB_OFFLINE": "1"}
TIMEOUT = 900
# What the scripts import, which takes longer than what they do.
SLOW = ["sklearn.datasets", "lightning", "accelerate", "transformers.models.bert.modeling_bert"]
SLOW += ["transformers.models.llama.modeling_llama", "transformers.trainer", "peft"]


def python(folder: Path, *arguments: str) -> str:
    """What an interpreter prints, run in ``folder``, without a network and on one core."""
    environment = {**os.environ, **OFFLINE, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run([sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where each script ran in a folder of its own, and what each run printed and complained about."""
    folder = tmp_path_factory.mktemp("examples")
    run_script(__file__, folder, timeout=TIMEOUT)
    return folder


def _run_all(here: Path) -> None:
    """Each run in a process of its own, forked from one that has imported what is slow to import."""
    torch.set_num_threads(1)
    os.environ |= OFFLINE
    for name in SLOW:
        importlib.import_module(name)
    for run, script, arguments, action in RUNS:
        (here / script).mkdir(exist_ok=True)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                for stream, kind in ((1, "out"), (2, "err")):
                    os.dup2(os.open(here / f"{run}.{kind}", os.O_WRONLY | os.O_CREAT), stream)
                os.chdir(here / script)
                sys.argv = [script, *arguments]
                warnings.simplefilter(action)  # type: ignore[arg-type]
                runpy.run_path(str(ROOT / "examples" / script), run_name="__main__")
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        (here / f"{run}.status").write_text(str(ended))


def printed(folder: Path, run: str) -> str:
    assert (folder / f"{run}.status").read_text() == "0", (folder / f"{run}.err").read_text()
    return (folder / f"{run}.out").read_text()


def printed_twice(folder: Path, run: str, script: str) -> str:
    """What a script prints every time; it leaves nothing behind."""
    first, again = printed(folder, run), printed(folder, f"{run} again")
    assert first == again
    assert not list((folder / script).iterdir())
    return first


def numbers(pattern: str, output: str) -> list[float]:
    """The numbers that the groups of ``pattern`` match, in the order of the lines."""
    found = [float(number) for match in re.finditer(pattern, output) for number in match.groups()]
    assert found, f"no '{pattern}' in\n{output}"
    return found


def test_plain_pytorch(folder: Path, tmp_path: Path) -> None:
    outputs = printed(folder, "plain"), printed(folder, "plain, seed 1")
    # As a user runs it: by an interpreter of its own.
    assert outputs[0] == python(tmp_path, "-W", "error", str(ROOT / "examples" / "plain_pytorch.py"), "--seed", "0")
    assert not list(tmp_path.iterdir())
    assert not list((folder / "plain_pytorch.py").iterdir())
    assert outputs[0] != outputs[1]
    for output in outputs:
        assert "193 of 193 weights are Bayesian." in output
        (covered,) = numbers(r"5-95 % band: ([\d.]+)%", output)
        assert 80 < covered < 97
        assert numbers(r"noise ([\d.]+)", output) == [0.05] * 4  # on the data and off it
        unknown = numbers(r"not known ([\d.]+)", output)
        assert unknown == sorted(unknown)
        assert unknown[0] < 0.05  # on the data less than the noise
        assert unknown[-1] > 10 * unknown[0]


@pytest.mark.supports("Training", "Lightning", "resumed bit for bit")
def test_lightning_goes_on_as_if_it_had_not_been_stopped(folder: Path) -> None:
    whole, stopped, resumed = (printed(folder, run) for run in ("whole", "stopped", "resumed"))
    accuracy, unknown = numbers(r"accuracy ([\d.]+)%, not known ([\d.]+)", whole)
    (of_torn,) = numbers(r"torn digits: not known ([\d.]+)", whole)
    assert accuracy > 88
    assert of_torn > 2 * unknown
    assert stopped != whole
    assert resumed == whole
    checkpoints = [folder / "lightning_module.py" / name / "last.ckpt" for name in ("whole", "parts")]
    one, two = (torch.load(checkpoint, weights_only=True) for checkpoint in checkpoints)
    assert int(one["state_dict"]["free_energy.step"]) == one["global_step"] == 40 * 13
    for part in ("state_dict", "optimizer_states"):
        torch.testing.assert_close(two[part], one[part], rtol=0, atol=0)


@pytest.mark.supports("Training", "Lightning in bf16, accumulated", "resumed bit for bit")
def test_lightning_in_bf16_with_accumulated_gradients_goes_on_too(folder: Path) -> None:
    whole, stopped, resumed = (printed(folder, f"lightning bf16 {run}") for run in ("whole", "parts", "resumed"))
    assert resumed == whole != stopped
    names = [folder / "lightning_module.py" / f"bf16-{name}" / "last.ckpt" for name in ("whole", "parts")]
    one, two = (torch.load(name, weights_only=True) for name in names)
    # 13 minibatches an epoch: each has noise of its own, and two of them make a step of the optimiser.
    assert int(one["state_dict"]["free_energy.step"]) == 4 * 13
    assert one["global_step"] == 4 * 7
    for part in ("state_dict", "optimizer_states"):
        torch.testing.assert_close(two[part], one[part], rtol=0, atol=0)
    assert {tensor.dtype for tensor in one["state_dict"].values()} == {torch.float32, torch.int64}  # bf16 runs it alone


@pytest.mark.supports("Training", "Accelerate in bf16, accumulated", "resumed bit for bit")
def test_accelerate_in_bf16_with_accumulated_gradients_goes_on_as_if_it_had_not_been_stopped(folder: Path) -> None:
    whole, stopped, resumed = (printed(folder, f"accelerate {run}") for run in ("whole", "stopped", "resumed"))
    accuracy, unknown = numbers(r"accuracy ([\d.]+)%, not known ([\d.]+)", whole)
    (of_torn,) = numbers(r"torn digits: not known ([\d.]+)", whole)
    assert accuracy > 88
    assert of_torn > 2 * unknown
    assert resumed != stopped
    assert whole == stopped.splitlines(keepends=True)[0] + resumed  # the validation of the first epochs, and the rest
    one, two = (folder / "accelerate_loop.py" / name for name in ("whole", "parts"))
    models = [load_file(each / "model.safetensors") for each in (one, two)]
    assert int(models[0]["step"]) == 30 * 26
    optimisers = [torch.load(each / "optimizer.bin", weights_only=True) for each in (one, two)]
    for each in (models, optimisers):
        torch.testing.assert_close(each[1], each[0], rtol=0, atol=0)


@pytest.mark.supports("Training", "the Trainer of transformers, Bayesian LoRA", "resumed bit for bit")
def test_bayesian_lora_by_the_trainer_goes_on_as_if_it_had_not_been_stopped(folder: Path) -> None:
    whole, stopped, resumed = (printed(folder, f"lora {run}") for run in ("whole", "stopped", "resumed"))
    for output in (whole, stopped, resumed):
        assert "5,376 of 196,896 weights are Bayesian" in output
        assert "loaded: same True" in output
    held_out = r"held-out sentences: nll ([\d.]+), not known ([\d.]+) nats"
    assert numbers(held_out, resumed) == numbers(held_out, whole) != numbers(held_out, stopped)
    # 8 minibatches an epoch, two for each step of the optimiser; each has noise of its own.
    one, two = (folder / "lora_trainer.py" / name / "checkpoints" / "checkpoint-16" for name in ("whole", "parts"))
    models = [load_file(each / "model.safetensors") for each in (one, two)]
    assert int(models[0]["free_energy.step"]) == 4 * 8
    optimisers = [torch.load(each / "optimizer.pt", weights_only=True) for each in (one, two)]
    for each in (models, optimisers):
        torch.testing.assert_close(each[1], each[0], rtol=0, atol=0)
    # The posterior stands beside the adapter's own files, without the network that both belong to.
    adapter, base = (folder / "lora_trainer.py" / "whole" / name for name in ("adapter", "base"))
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {path.name for path in adapter.iterdir()}
    sizes = [path.stat().st_size for path in (adapter / "posterior.safetensors", base / "model.safetensors")]
    assert sizes[0] < sizes[1] / 8


@pytest.mark.supports("Training", "a network of transformers", "in a loop of your own")
def test_hugging_face(folder: Path) -> None:
    output = printed_twice(folder, "hugging face", "hugging_face.py")
    assert re.search(r"(?m)^classifier\.weight .* Normal", output)
    assert re.search(r"encoder\.layer\.0\.output\.dense\.weight .* deterministic .* not selected", output)
    assert "loaded: same posterior True, same mean True" in output
    assert numbers(r"accuracy ([\d.]+)%", output)[0] > 90
    good, bad, new = numbers(r"(\d+)% good", output)
    assert good > 90
    assert bad < 10
    assert bad < new < good
    *known, unknown = numbers(r"not known ([\d.]+)", output)
    assert unknown > 5 * max(known)


def test_pretrained(folder: Path) -> None:
    output = printed_twice(folder, "pretrained", "pretrained.py")
    assert "\n645 of 5,445 weights are Bayesian." in output
    assert "\n5,445 of 5,445 weights are Bayesian." in output
    plain, head, around = re.findall(r"accuracy.*", output)
    accuracies, own, others = zip(*(numbers(r"([\d.]+)%", line) for line in (plain, head, around)), strict=True)
    assert min(accuracies) > 80
    assert others[0] > 50  # sure of what it cannot know
    assert max(others[1:]) < others[0] / 2
    assert own[1] > 3 * others[1]  # while it is of its own digits


# --- the page ---------------------------------------------------------------------------------------------------------


def test_the_page_has_every_script_whole() -> None:
    included = re.findall(r'^ *--8<-- "(.+)"$', PAGE, flags=re.MULTILINE)  # a formatter of Markdown may break it
    assert sorted(included) == [str(script.relative_to(ROOT)) for script in SCRIPTS]
    for script in SCRIPTS:
        assert script.name in {name for _, name, *_ in RUNS}, f"no test runs {script.name}"


def test_the_page_quotes_the_scripts() -> None:
    """Each short piece of code of the page is a run of lines of a script."""
    pieces = re.findall(r"^```py\n(.*?)\n```$", PAGE, flags=re.DOTALL | re.MULTILINE)
    assert len(pieces) >= 4
    for piece in pieces:
        assert any(_quotes(piece, script.read_text()) for script in SCRIPTS), f"in no script of examples/:\n{piece}"


def _quotes(piece: str, script: str) -> bool:
    lines, many = script.splitlines(), len(piece.splitlines())
    runs = (lines[start : start + many] for start in range(len(lines)))
    return any(textwrap.dedent("\n".join(each)) == piece for each in runs)


if __name__ == "__main__":
    _run_all(Path(sys.argv[1]))
