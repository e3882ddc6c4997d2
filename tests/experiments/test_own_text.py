"""Own text from the file to a saved model, which needs the file no more."""

import jax
import pytest
from all_configs import executed

from dpx.runs import records

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("record", ["line", pytest.param("window", marks=pytest.mark.slow)])
def test_a_saved_model_needs_no_private_text(tmp_path, record):
    path = tmp_path / "own.txt"
    path.write_text("\n".join(f"line {i} says to be or not" for i in range(400)))
    config = records.load_config("configs/text.py:tiny")
    config.update({"data": {"path": str(path), "record": record}})
    found = executed(config, "configs/text.py:tiny", tmp_path / "run")
    assert found.releases["dp_transformer"]["unit"] == record
    path.unlink()
    model = records.load(tmp_path / "run")
    assert model.log_prob(["line 3 says to b"])[0] < 0
    assert len(model.sample(jax.random.key(0), 2)) == 2
