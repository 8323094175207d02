"""What a configuration of many params costs, and what it may not say."""

from __future__ import annotations

import pytest

import attndsl
from attndsl.config import read_config
from attndsl.errors import ConfigError
from attndsl.runtime.programs import make_spec


def test_params_of_a_long_line_do_not_carry_it_each(tmp_path):
    path = tmp_path / "many.yaml"
    params = ", ".join(f"w{number}: 1" for number in range(400))
    path.write_text(f"{{a: {{program: 'q >= kv', params: {{{params}}}}}}} # {'x' * 40_000}")
    (entry,) = read_config(path)
    assert len(entry.params) == 400
    assert len(make_spec(entry.text, entry.params)) < 100_000


def test_a_param_stands_once(tmp_path):
    path = tmp_path / "twice.yaml"
    path.write_text("a:\n  program: q - kv < w\n  params: {w: 3, w: 4}\n")
    with pytest.raises(ConfigError, match="'w' stands twice"):
        attndsl.load(path)
