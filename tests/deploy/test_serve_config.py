"""A Serve configuration file is refused for what Ray would pass over in silence."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.cluster.errors import ConfigError
from paceline.deploy.cli import main
from paceline.deploy.serve_config import IMPORT_PATH, check_serve_config


def document(**changes: Any) -> dict[str, Any]:
    app: dict[str, Any] = {
        "name": "paceline",
        "route_prefix": "/",
        "import_path": IMPORT_PATH,
        "args": {"model": "default", "max_num_seqs": 8},
        "deployments": [{"name": "paceline", "autoscaling_config": {"min_replicas": 1, "max_replicas": 2}}],
    }
    return {"http_options": {"port": 8000}, "applications": [app | changes]}


def test_a_right_file_gives_the_configuration_of_the_engine() -> None:
    (config,) = check_serve_config(document())

    assert config.engine.max_num_seqs == 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"route_prefx": "/"},
            r"applications\[0\]: unknown key 'route_prefx'; did you mean 'route_prefix'\?",
        ),
        (
            {"deployments": [{"name": "paceline", "num_replica": 2}]},
            r"applications\[0\]\.deployments\[0\]: unknown key 'num_replica'; did you mean 'num_replicas'\?",
        ),
        (
            {"deployments": [{"name": "paceline", "autoscaling_config": {"max_replica": 2}}]},
            r"deployments\[0\]\.autoscaling_config: unknown key 'max_replica'; did you mean 'max_replicas'\?",
        ),
        ({"args": {"max_num_seq": 8}}, r"'max_num_seq' is unknown; did you mean 'max_num_seqs'\?"),
        ({"args": {"max_num_seqs": "many"}}, r"Expected `int`, got `str`"),
        ({"deployments": [{"name": "paceline", "num_replicas": -1}]}, r"applications\[0\]\.deployments\[0\]"),
        ({"import_path": "elsewhere:app"}, r"no application has the import_path"),
    ],
)
def test_a_wrong_file_is_refused_by_place_and_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_serve_config(document(**changes))


def test_the_command_answers_with_its_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(yaml.safe_dump(document()))
    assert main(["check", str(file)]) == 0

    file.write_text(yaml.safe_dump(document() | {"http_option": {}}))
    assert main(["check", str(file)]) == 2
    assert "did you mean 'http_options'?" in capsys.readouterr().err

    file.write_text("a: [")
    assert main(["check", str(file)]) == 2
