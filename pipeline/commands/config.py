"""`longhaul config`: a config with all its values; or the keys, kinds and presets there are."""

import argparse

from longhaul.pipeline.arguments import add_config_arguments
from longhaul.pipeline.terminal.table import print_table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser, is_required=False)
    what = parser.add_mutually_exclusive_group()
    for name in ("keys", "kinds", "presets"):
        what.add_argument(
            f"--{name}", action="store_const", const=name, dest="listed", help=f"list all {name}"
        )


def main(args: argparse.Namespace) -> int:
    if (args.config is None) == (args.listed is None):
        found = "found none" if args.config is None else f"found {args.config} with --{args.listed}"
        raise ValueError(f"config: {found}, wanted CONFIG, or one of --keys, --kinds, --presets")
    from longhaul.configs import load_run_config, to_yaml

    if args.listed == "keys":
        _print_keys()
    elif args.listed == "kinds":
        _print_kinds()
    elif args.listed == "presets":
        from longhaul.configs.presets import presets

        print_table([*presets().items()], align=str.ljust)
    else:
        print(to_yaml(load_run_config(args.config, args.overrides)), end="")
    return 0


def _print_keys() -> None:
    from longhaul.configs.reference import kind_section, parts_of_kinds, sections
    from longhaul.modules.attention import registered_variants

    rows = [key for section in sections() for key in section.keys]
    for kind in registered_variants():
        rows += [
            key._replace(name=f"model.attention.{key.name} ({kind})")
            for key in kind_section(kind).keys
        ]
    for part in parts_of_kinds():
        rows += [key._replace(name=f"model.attention.{key.name}") for key in part.keys]
    print_table(rows, align=str.ljust)


def _print_kinds() -> None:
    from longhaul.configs.reference import kind_meaning
    from longhaul.modules.attention import attention_config, registered_variants

    rows = [
        (kind, attention_config(kind).cost, kind_meaning(kind)) for kind in registered_variants()
    ]
    print_table(rows, align=str.ljust)
