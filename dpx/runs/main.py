"""The command `dpx`, which dispatches to its subcommands (run, sweep, report and others)."""

import sys
from collections.abc import Callable

import dpx
from dpx.runs import cli, export, listing, plan, query, report, run, sources, sweep

_COMMANDS: dict[str, tuple[str, Callable[[], None]]] = {
    "run": ("runs one configured experiment", run.start),
    "sweep": ("runs it over a grid", sweep.start),
    "report": ("writes tables and figures of finished runs", report.start),
    "plan": ("plans batches and steps of a training before anything is spent", plan.start),
    "sample": ("draws texts from the private model of a run", query.start_sample),
    "recommend": ("recommends items by the private model of a run", query.start_recommend),
    "predict": ("classifies texts by the private model of a run", query.start_predict),
    "ask": ("asks the private memory of a run", query.start_ask),
    "export": ("writes the private model of a run for others, with a card", export.start),
    "configs": ("lists the configs", lambda: print(listing.overview())),
}


def start() -> None:
    """Runs the subcommand that the first argument names."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in ("-h", "--help", "--helpshort", "--helpfull", "help"):
        print(_usage())
    elif name == "--version":
        print(dpx.__version__)
    elif name in _COMMANDS:
        sys.argv = [f"dpx {name}", *sys.argv[2:]]
        _COMMANDS[name][1]()
    else:
        close = sources.did_you_mean(name, _COMMANDS)
        cli.stop(ValueError(f"dpx {name} is no command{close}: use one of {', '.join(_COMMANDS)}"))


def _usage() -> str:
    lines = ["usage: dpx COMMAND [--flag=value ...]; dpx COMMAND --help lists the flags", ""]
    lines += [f"  dpx {name:10} {words}" for name, (words, _) in _COMMANDS.items()]
    return "\n".join([*lines, "", f"configs: {', '.join(sources.names())}, or a file of your own"])
