"""Compile for a GPU what the Triton operators launch: ``python compile_triton.py`` prints the name of each kernel.

Compiling needs no GPU. The interpreter runs any Python, the compiler accepts only a part of it: the tests under the
interpreter show that a kernel computes the right numbers, this program shows that it is a kernel. It is a program of
its own, because a process either interprets or compiles.
"""

from types import SimpleNamespace
from typing import Any


def main() -> None:
    # Imported here: pytest looks for doctests in this file too, in a process that interprets.
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.runtime import JITFunction, driver

    from bayesbackprop._engine import triton as kernels

    run = JITFunction.run

    def compile_only(kernel: Any, *arguments: object, warmup: bool, **options: object) -> None:
        compiled = run(kernel, *arguments, warmup=True, **options)
        assert "ptx" in compiled.asm
        print(compiled.metadata.name)

    JITFunction.run = compile_only
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", 80, 32),  # compute capability 8.0, warps of 32; any would do
            get_current_device=lambda: 0,
            get_current_stream=lambda _: 0,
        )
    )

    def draw_and_backward(prior: kernels.Prior, dtype: torch.dtype, centred: bool, step: int | torch.Tensor) -> None:
        mu, rho, gradient = torch.randn(3, 40).to(dtype)
        centre = torch.zeros_like(mu) if centred else None
        w, _ = kernels.draw(mu, rho, centre, prior, stream=20, seed=2**63, step=step, draw=1)
        kernels.backward(mu, rho, centre, prior, w, gradient, 0.5)

    for noise in (kernels.normal, kernels.signs):
        noise((40,), 0, 1, 2, 20, torch.float32, torch.device("cpu"))
    # Each kind of prior, of number, of centre and of step once: a kernel takes half a second.
    draw_and_backward((kernels.NONE, 0.0, 0.0, 0.0), torch.float32, centred=False, step=1)
    draw_and_backward((kernels.NORMAL, 0.3, 0.0, 0.0), torch.bfloat16, centred=True, step=torch.tensor(1))
    draw_and_backward((kernels.MIXTURE, 0.25, 1.0, 0.1), torch.float64, centred=True, step=torch.tensor(1))
    draw_and_backward((kernels.LAPLACE, 0.2, 0.0, 0.0), torch.float32, centred=False, step=1)
    draw_and_backward((kernels.NORMAL_KL, 0.3, 0.0, 0.0), torch.float32, centred=True, step=1)
    draw_and_backward((kernels.LAPLACE_KL, 0.2, 0.0, 0.0), torch.float64, centred=True, step=1)


if __name__ == "__main__":
    main()
