"""Every command that README and docs show, and how a test knows that it works.

A command that a page gains must be added here, or `test_commands.py` fails.
"""

from __future__ import annotations

from typing import NamedTuple

from house.pages import blocks


class Run(NamedTuple):
    """Cheap: the test runs it in an empty folder and wants exit code 0.

    Attributes:
        files: Files put there first, as name and text.
    """

    files: tuple[tuple[str, str], ...] = ()


class ContinuousIntegration(NamedTuple):
    """Run by `.ci/run` itself.

    Attributes:
        target: The make target that the script names.
    """

    target: str


class Covered(NamedTuple):
    """Run, in full or with smaller numbers, by a test elsewhere.

    Attributes:
        test: `path::function` of that test.
    """

    test: str


_NOTES = "".join(f"{number} bottles of beer on the wall\n" for number in range(999, 0, -1))


def _first_block(page: str, language: str) -> str:
    return next(block.text for block in blocks(language) if block.page == page)


COMMANDS: dict[str, Run | ContinuousIntegration | Covered] = {
    "forebay train --model model.json --data notes.txt --output runs/notes --steps 20": Run(
        files=(("model.json", _first_block("docs/index.md", "json")), ("notes.txt", _NOTES))
    ),
    "forebay train --model model.json --data notes.txt --output runs/long --steps 60 "
    "--save-every 20": Covered("tests/cli/test_train_resume.py::test_killed_between_saves"),
    "forebay train --model model.json --data notes.txt --output runs/long --steps 60 --resume": (
        Covered("tests/cli/test_train_resume.py::test_killed_between_saves")
    ),
    "forebay probe --report": Run(),
    "forebay probe --quick --output machine.json": Run(),
    "forebay plan 8B --machine 4090 --sequence 1024": Run(),
    "forebay plan 13B --machine v100-32 --nodes 4 --batch 512 --sequence 1024 --compare": Run(),
    "forebay plan 70B --machine a100-80 --hidden 8192 --layers 80 --config ready.json": Run(),
    "forebay probe nvme . --most 256MiB": Run(),
    "python benchmarks/on_gpu.py --list": Covered(
        "tests/cli/test_on_gpu.py::test_without_a_gpu_it_says_so_and_lists"
    ),
    "forebay bench adam --output results": Covered(
        "tests/unit/test_bench.py::test_commands_write_tables"
    ),
    "forebay bench step --size 3b --variants floor,none,r0,r50 --timeline trace-{variant}.json": (
        Covered("tests/unit/test_bench.py::test_commands_write_tables")
    ),
    "forebay bench checkpoint --folder checkpoints --output results": Covered(
        "tests/unit/test_bench.py::test_checkpoint_command_writes_a_table"
    ),
    "forebay bench step --micro-batch 2,4,8,16 --variants floor,none,r0,deepspeed3@8+16": Covered(
        "tests/unit/test_bench_runs.py::test_step_command_in_small"
    ),
    "forebay bench step --size 7b --device-budget 12GB --variants streamed+1+0+offload --steps 5": (
        Covered("tests/unit/test_bench_streamed.py::test_weights_on_the_host_cross_twice_an_update")
    ),
    "forebay bench step --size 7b --variants streamed+1,streamed+1+layer --accumulation 8": (
        Covered("tests/unit/test_bench_streamed.py::test_weights_on_the_host_cross_twice_an_update")
    ),
    "forebay bench step --size 19b --variants streamed+2+0.53+host --micro-batch 1 --steps 3": (
        Covered("tests/unit/test_bench_streamed.py::test_half_of_the_parameters_stay")
    ),
    "forebay bench step --size 8k --variants device,device+offload --steps 5": Covered(
        "tests/unit/test_bench_streamed.py::test_any_variant_may_keep_activations_on_the_host"
    ),
    "forebay bench step --size 32k --variants device,device+offload --micro-batch 4 --steps 4": (
        Covered(
            "tests/unit/test_bench_streamed.py::"
            "test_frozen_shapes_train_what_is_beside_their_matrices"
        )
    ),
    "forebay bench reads --variants r0,r50": Covered(
        "tests/unit/test_bench_runs.py::test_reads_command_in_small"
    ),
    "forebay bench lengths --variants r0,r50 --lengths 512,4096": Covered(
        "tests/unit/test_bench_runs.py::test_lengths_command_in_small"
    ),
    "python examples/train_then_generate.py": Covered(
        "tests/cli/test_examples.py::test_train_then_generate"
    ),
    "forebay bench states --size 3b --variants device,r0": Covered(
        "tests/unit/test_bench_runs.py::test_states_command_in_small"
    ),
    "torchrun --nproc-per-node 8 train.py": Covered(
        "tests/distributed/test_initialize.py::test_three_ranks_share_the_data"
    ),
    "torchrun --nproc-per-node 8 -m forebay train --model model --data data --output run": Covered(
        "tests/distributed/test_train.py::test_torchrun_runs_the_command"
    ),
    "bash .ci/run": ContinuousIntegration("setup"),
    "make check": ContinuousIntegration("lint"),
    "make demo": Covered("tests/cli/test_demo.py::test_demo_in_small"),
    "make test": ContinuousIntegration("test"),
    "pip install .": Covered("tests/house/test_wheel.py::test_wheel_is_whole"),
    "python tools/cli_reference.py": Covered(
        "tests/house/test_generated.py::test_command_line_page_is_current"
    ),
    "python tools/draw_timeline.py": Covered(
        "tests/house/test_generated.py::test_step_picture_is_current"
    ),
}
