"""whereformer doctor: what is installed, and whether it works."""

import argparse
import json
from itertools import groupby

from whereformer.cli.show import print_facts

BROKEN = 1
"""The exit code where something that is installed does not work."""

EXAMPLES = """\
examples:
  whereformer doctor
  whereformer doctor --json > doctor.json
      for a bug report

Exit code 1: something that is installed does not work.
"""


def arguments(command: argparse.ArgumentParser) -> None:
    """None but --json."""


def doctor(options: argparse.Namespace) -> None:
    """say what is installed, what works and what is missing: versions, the CPU kernel, backends, libraries"""
    from whereformer.doctor import examine

    findings = list(examine())
    topics = {topic: list(group) for topic, group in groupby(findings, key=lambda one: one.topic)}
    broken = [f"{one.topic}: {one.name}" for one in findings if one.broken]
    if options.json:
        said = {topic: {one.name: one.says for one in group} for topic, group in topics.items()}
        print(json.dumps({"broken": broken, **said}, indent=2))
    else:
        for topic, group in topics.items():
            print_facts(topic, {one.name: "BROKEN: " * one.broken + one.says for one in group})
        print(f"\nBroken: {'; '.join(broken)}" if broken else "\nAll that is installed works.")
    if broken:
        raise SystemExit(BROKEN)
