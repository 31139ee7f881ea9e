"""Models on the meta device have the shapes of others, and torch does not import its compiler."""

import json
import subprocess
import sys

from longhaul.modules.attention import attention_config, registered_variants
from longhaul.modules.language_model import LanguageModel
from longhaul.modules.language_model_config import LanguageModelConfig

CODE = """
import json, sys
from longhaul.modules.attention import attention_config, registered_variants
from longhaul.modules.language_model_config import LanguageModelConfig
from longhaul.modules.meta_device import build_on_meta

found = {}
for kind in registered_variants():
    config = LanguageModelConfig(attention=attention_config(kind)(), layers=1, width=64, heads=2)
    state = build_on_meta(config).state_dict()
    assert all(x.is_meta for x in state.values())
    shapes = {name: list(x.shape) for name, x in state.items()}
    found[kind] = shapes, "torch._dynamo" in sys.modules
print(json.dumps(found))
"""


def test_kinds_have_their_shapes_without_the_compiler() -> None:
    command = [sys.executable, "-P", "-c", CODE]
    done = subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE)
    found = json.loads(done.stdout)
    assert list(found) == list(registered_variants())
    for kind, (shapes, has_compiler) in found.items():
        assert not has_compiler, kind
        config = LanguageModelConfig(
            attention=attention_config(kind)(), layers=1, width=64, heads=2
        )
        wanted = LanguageModel(config).state_dict()
        assert shapes == {name: list(x.shape) for name, x in wanted.items()}, kind
