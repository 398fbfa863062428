"""`papaya completion`: completion scripts for bash, zsh and fish.

A script lists every command with its options and their choices; it is made from the parsers of the
commands, so it is always up to date. It is static: pressing TAB does not start Python, which would
take a third of a second. We use no library: of the usual two, one does not support fish and the
other starts Python each time.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from papaya.cli.main import COMMANDS, parser_for
from papaya.cli.output import Commands, bind, print_data

Shell = Literal["bash", "zsh", "fish"]
_FILES = ("FILE", "DIR", "PATH", "FOLDER", "TASK.py")


class CompletedOption(NamedTuple):
    """An option. `choices`: its values; None if it takes none, empty if any text or file is one."""

    name: str
    help: str
    choices: tuple[str, ...] | None


class CompletedCommand(NamedTuple):
    """A command by its words after `papaya`, with what may follow."""

    words: str
    help: str
    options: tuple[CompletedOption, ...]
    follows: tuple[str, ...]
    """Subcommands, or choices of the first positional argument."""
    takes_files: bool


@dataclass(frozen=True, kw_only=True)
class CompletionOptions:
    shell: Shell


def add_to(commands: Commands) -> None:
    parser = commands.add_parser(
        "completion",
        description="Print the completion script of a shell. To use it in this shell: "
        'eval "$(papaya completion bash)", or: papaya completion fish | source.',
    )
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="shell to print it for")
    bind(parser, CompletionOptions, run)


def run(options: CompletionOptions) -> int:
    found = list(completed(parser_for(COMMANDS)))
    print_data({"bash": bash, "zsh": zsh, "fish": fish}[options.shell](found))
    return 0


def completed(
    parser: argparse.ArgumentParser, words: str = "", text: str = ""
) -> Iterator[CompletedCommand]:
    """The command of a parser, then those below it."""
    options, follows, below = [], list[str](), []
    takes_files = False
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            texts = {each.dest: each.help or "" for each in action._choices_actions}
            below = [(name, sub, texts.get(name, "")) for name, sub in action.choices.items()]
            follows += [name for name, _, _ in below]
        elif action.option_strings:
            name = action.option_strings[-1]
            takes_value = action.nargs != 0
            choices = tuple(str(choice) for choice in action.choices or ())
            options.append(
                CompletedOption(name, action.help or "", choices if takes_value else None)
            )
        elif action.choices:
            follows += [str(choice) for choice in action.choices]
        else:
            takes_files = takes_files or action.metavar in _FILES
    yield CompletedCommand(words, text, tuple(options), tuple(follows), takes_files)
    for name, sub, about in below:
        yield from completed(sub, f"{words} {name}".strip(), about)


def _word(text: str) -> str:
    return shlex.quote(text)


def _table(commands: list[CompletedCommand]) -> Iterator[str]:
    """A case for each command, and one for each option with choices; for bash and zsh."""
    yield "  case $at in"
    for command in commands:
        names = " ".join(option.name for option in command.options)
        follows = " ".join(command.follows)
        yield f"    {_word(command.words)}) options={_word(names)} follows={_word(follows)} ;;"
    yield "  esac"
    yield '  case "$at $before" in'
    for command in commands:
        for option in command.options:
            if option.choices is not None:
                where, values = (
                    _word(f"{command.words} {option.name}"),
                    _word(" ".join(option.choices)),
                )
                yield f"    {where}) values={values} takes=1 ;;"
    yield "  esac"


def _walk(commands: list[CompletedCommand], words: str) -> Iterator[str]:
    """Finds the command that the words so far name."""
    known = "|".join(_word(command.words) for command in commands if command.words)
    yield "  at=''"
    yield f"  for word in {words}; do"
    yield '    case "${at:+$at }$word" in'
    yield f'      {known}) at="${{at:+$at }}$word" ;;'
    yield "    esac"
    yield "  done"


def bash(commands: list[CompletedCommand]) -> str:
    lines = [
        "_papaya() {",
        "  local at word options follows values='' takes=''",
        '  local current="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}"',
        *_walk(commands, '"${COMP_WORDS[@]:1:COMP_CWORD-1}"'),
        *_table(commands),
        "  COMPREPLY=()",
        '  if [[ -n $values ]]; then COMPREPLY=($(compgen -W "$values" -- "$current"))',
        '  elif [[ -n $takes ]]; then COMPREPLY=($(compgen -f -- "$current"))',
        '  elif [[ $current == -* ]]; then COMPREPLY=($(compgen -W "$options" -- "$current"))',
        '  elif [[ -n $follows ]]; then COMPREPLY=($(compgen -W "$follows" -- "$current"))',
        '  else COMPREPLY=($(compgen -f -- "$current"))',
        "  fi",
        "}",
        "complete -o filenames -F _papaya papaya",
    ]
    return "\n".join(lines)


def zsh(commands: list[CompletedCommand]) -> str:
    lines = [
        "#compdef papaya",
        "_papaya() {",
        "  local at word options follows values='' takes=''",
        '  local current="${words[CURRENT]}" before="${words[CURRENT-1]}"',
        *_walk(commands, '"${(@)words[2,CURRENT-1]}"'),
        *_table(commands),
        "  if [[ -n $values ]]; then compadd -- ${=values}",
        "  elif [[ -n $takes ]]; then _files",
        "  elif [[ $current == -* ]]; then compadd -- ${=options}",
        "  elif [[ -n $follows ]]; then compadd -- ${=follows}",
        "  else _files",
        "  fi",
        "}",
        "compdef _papaya papaya",
    ]
    return "\n".join(lines)


def fish(commands: list[CompletedCommand]) -> str:
    known = " ".join(_fish_word(command.words) for command in commands if command.words)
    lines = [
        "function __papaya_at",
        f"  set -l known {known}",
        "  set -l at ''",
        "  for word in (commandline -opc)[2..]",
        '    set -l longer (string trim -- "$at $word")',
        '    contains -- "$longer" $known; and set at "$longer"',
        "  end",
        '  test "$at" = "$argv[1]"',
        "end",
        "complete -c papaya -e",
    ]
    texts = {command.words: command.help for command in commands}
    for command in commands:
        at = f"complete -c papaya -n {_fish_word('__papaya_at ' + _fish_word(command.words))}"
        for name in command.follows:
            about = texts.get(f"{command.words} {name}".strip(), "")
            lines.append(f"{at} -f -a {name} -d {_fish_word(_short(about))}")
        for option in command.options:
            kind = f"-l {option.name.lstrip('-')}"
            if option.choices is not None:
                kind += (
                    f" -x -a {_fish_word(' '.join(option.choices))}" if option.choices else " -r"
                )
            lines.append(f"{at} {kind} -d {_fish_word(_short(option.help))}")
    return "\n".join(lines)


def _fish_word(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _short(text: str) -> str:
    """The first sentence of a help text."""
    return " ".join(text.replace("%%", "%").split())[:80]
