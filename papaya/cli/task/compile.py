"""`papaya task compile my_task.py`: make the program of a task, for devices without torch.

The file is imported here, on the owner's machine. The program has the forward and the backward
pass of the model and the loss, and the settings that a device needs; it has no Python code and no
parameters. Give it to devices, then submit the task with it. A signed task needs no such step:
`papaya task submit my_task.py --engine executorch`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from papaya.bundle import archive
from papaya.cli.output import (
    Commands,
    FormatOptions,
    add_format,
    bind,
    note,
    print_data,
    print_json,
)
from papaya.cli.task.signing import program_files
from papaya.errors import OperatorError
from papaya.progress import elapsed


@dataclass(frozen=True, kw_only=True)
class TaskCompileOptions(FormatOptions):
    file: Path
    output: Path | None = None


def add_to(actions: Commands) -> None:
    parser = actions.add_parser(
        "compile",
        help="make a program from a Python file, for devices without torch",
        description="Make a program from a Python file that ends in `task = Task(...)`, compare it "
        "with PyTorch for ten training steps, and write it to a file for devices that run "
        "`papaya client --engine executorch`.",
    )
    parser.add_argument("file", type=Path, metavar="TASK.py", help="Python file of the task")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="where to write the program (default: the name of the file, ending in .program)",
    )
    add_format(parser)
    bind(parser, TaskCompileOptions, run)


def run(options: TaskCompileOptions) -> int:
    from papaya.learning.executorch.program_file import decode_program, frozen_beside
    from papaya.learning.executorch.shim import cache_folder
    from papaya.learning.task import load_task  # here: it imports torch

    loaded = load_task(options.file)
    from papaya.learning.torch.export import compile_task, program_tensors

    note("compiling (ten seconds to a few minutes, unless the result is cached)")
    content = archive.digest(archive.pack(program_files(options.file)))
    with elapsed("compiling"):
        data = compile_task(loaded, cache_folder() / "programs", content)
    output = options.output or options.file.with_suffix(".program")
    frozen = frozen_beside(output)
    tensors = program_tensors(loaded, decode_program(data).header.file_names)
    try:
        output.write_bytes(data)
        if tensors:
            frozen.write_bytes(tensors)
    except OSError as error:
        raise OperatorError(
            f"cannot write {output}: {error.strerror}", hint="choose another place: --output FILE"
        ) from error
    program = decode_program(data)
    if options.is_json:
        print_json({"file": str(output), "name": program.name, "bytes": len(data)})
    else:
        print_data(f"{output}: {len(data):,} bytes, {program.name}")
        if tensors:
            print_data(
                f"{frozen}: {len(tensors):,} bytes of frozen tensors; keep both files together"
            )
        note(
            f"\non devices: papaya client --engine executorch --task {output}"
            f"\nto submit it: papaya task submit {options.file} --program {output} --unsigned"
        )
    return 0
