"""Models in folders and on Hugging Face's hub: our one safetensors file, and a page that says how to load it.

Nothing that is loaded runs code: the network is yours, and the file holds numbers and JSON.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import nn

from bayesbackprop._errors import check_flag, check_path, check_text, check_type, invalid
from bayesbackprop._files import write_atomically
from bayesbackprop.likelihoods import Likelihood
from bayesbackprop.model import Bayesian
from bayesbackprop.priors import Prior
from bayesbackprop.saving import load, save

__all__ = ["from_pretrained", "push_to_hub", "save_pretrained"]

# The file of a model. Adapters and networks of other libraries have files of their own beside it.
POSTERIOR = "posterior.safetensors"
_PAGE = "README.md"
_REPOSITORY = re.compile(r"[\w.-]*\w(/\w[\w.-]*)?")

_CARD = """---
library_name: bayesbackprop
tags:
- bayesian-neural-network
- uncertainty
---
# {title}

A Bayesian neural network by [bayesbackprop](https://pypi.org/project/bayesbackprop/): {weights:,} weights have a
distribution.

```python
import bayesbackprop as bbb

model = bbb.from_pretrained("{source}", net)  # net: a network of the same architecture
predicted = model.predict(x, draws=100)  # predicted.mean, predicted.epistemic
```

- likelihood: `{likelihood}`
- what the file holds: {holds}

```text
{report}
```
"""


def save_pretrained(model: Bayesian, folder: str | os.PathLike[str], *, frozen: bool = True) -> None:
    """Write ``model`` into ``folder``: ``posterior.safetensors``, and a page ``README.md`` unless there is one.

    Files of others stay as they are. So the posterior of adapters stands beside the files of the adapters themselves:
    ``peft_model.save_pretrained(folder)``, then ``save_pretrained(model, folder, frozen=False)``.

    Args:
        model: The model.
        folder: Where to; it is made if it is not there.
        frozen: Whether parameters that are not trained are written too, as of :func:`~bayesbackprop.save`.
    """
    check_type("save_pretrained", Bayesian, "a Bayesian", model=model)
    place = check_path("save_pretrained", folder=folder)
    check_flag("save_pretrained", frozen=frozen)
    if place.exists() and not place.is_dir():
        raise invalid("folder", "save_pretrained", "a folder, or none yet", str(place))
    place.mkdir(parents=True, exist_ok=True)
    save(model, place / POSTERIOR, frozen=frozen)
    if not (place / _PAGE).exists():
        write_atomically(place / _PAGE, _card(model, place.name, str(folder), frozen).encode())


def from_pretrained(
    source: str | os.PathLike[str],
    net: nn.Module,
    *,
    likelihood: Likelihood | None = None,
    prior: Prior | Mapping[str, Prior] | None = None,
    output: Callable[[Any], Any] | None = None,
    revision: str | None = None,
    token: str | None = None,
) -> Bayesian:
    """The model in a folder, or in a repository of the hub, on ``net``, as :func:`~bayesbackprop.load` reads it.

    Args:
        source: A folder that :func:`save_pretrained` wrote, or the name of a repository such as ``"user/model"``.
        net: A network of the same architecture, which receives the means.
        likelihood: Needed where the model had a likelihood of the user's own.
        prior: Needed where the model had a prior of the user's own.
        output: Needed where the model picked what its likelihood takes by a function, ``Bayesian(..., output=...)``.
        revision: Of the repository: a branch, a tag or a commit.
        token: Of the user, for a repository that is not public; None for the one that is logged in.
    """
    place = check_path("from_pretrained", source=source)
    check_type("from_pretrained", nn.Module, "a torch.nn.Module", net=net)
    if not place.is_dir():
        hub = _hub("from_pretrained")
        if not _REPOSITORY.fullmatch(str(source)):
            constraint = 'a folder that is there, or the name of a repository of the hub, "user/model"'
            raise invalid("source", "from_pretrained", constraint, str(source))
        with _answering(hub):
            place = Path(hub.hf_hub_download(str(source), POSTERIOR, revision=revision, token=token)).parent
    return load(place / POSTERIOR, net, likelihood=likelihood, prior=prior, output=output)


def push_to_hub(
    model: Bayesian,
    repository: str,
    *,
    frozen: bool = True,
    private: bool = False,
    message: str = "Upload a posterior",
    token: str | None = None,
) -> str:
    """Put ``model`` into a repository of the hub, which is made if it is not there; the address of what was put there.

    Files of others that are there stay, and so does a page.

    Args:
        model: The model.
        repository: Its name, such as ``"user/model"``.
        frozen: Whether parameters that are not trained go there too, as of :func:`~bayesbackprop.save`.
        private: Whether a repository that is made is the user's alone.
        message: What the hub says of the change.
        token: Of the user; None for the one that is logged in.
    """
    check_type("push_to_hub", Bayesian, "a Bayesian", model=model)
    check_text("push_to_hub", repository=repository, message=message)
    check_flag("push_to_hub", frozen=frozen, private=private)
    library = _hub("push_to_hub")
    hub = library.HfApi(token=token)
    with TemporaryDirectory() as folder, _answering(library):
        here = Path(folder)
        save(model, here / POSTERIOR, frozen=frozen)
        hub.create_repo(repository, private=private, exist_ok=True)
        if not hub.file_exists(repository, _PAGE):
            (here / _PAGE).write_text(_card(model, repository, repository, frozen))
        return str(hub.upload_folder(repo_id=repository, folder_path=here, commit_message=message).commit_url)


def _card(model: Bayesian, title: str, source: str, frozen: bool) -> str:
    weights = sum(q.numel for q in model.posterior.values())
    holds = "all parameters" if frozen else "the posterior alone; frozen parameters are those of the network given"
    return _CARD.format(
        title=title, source=source, weights=weights, holds=holds, likelihood=model.likelihood, report=model.report()
    )


@contextmanager
def _answering(hub: Any) -> Iterator[None]:
    """Within it, an error of the client before the hub has answered is named as that."""
    try:
        yield
    except (hub.errors.HfHubHTTPError, ValueError, OSError):
        raise  # the hub has answered, or the name or a file is at fault
    except Exception as error:
        raise ConnectionError(f"The hub of Hugging Face could not be reached: {error}") from error


def _hub(owner: str) -> Any:
    try:
        import huggingface_hub
    except ImportError as error:
        raise ImportError(f'{owner} needs huggingface_hub: pip install "bayesbackprop[hub]"') from error
    return huggingface_hub
