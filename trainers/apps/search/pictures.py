"""The pictures of a search: optuna's, on one HTML page that needs no network."""

import html
from typing import Any

from trainers.apps.search.study import Ended, optuna
from trainers.errors import ArgumentError
from trainers.files.model_file import replacing


def plotly() -> Any:
    """Import plotly's writer of HTML. Raises ArgumentError if it is not installed."""
    try:
        import plotly.io as module
    except ImportError as error:
        raise ArgumentError(f'--html needs plotly ({error}): pip install ".[search]" in the checkout') from error
    return module


def figures(study: Any) -> list[tuple[str, Any]]:
    """Return titles and plotly figures. study: optuna's, with complete trials; of one direction."""
    module = optuna()
    plots = module.visualization
    found = [("History", plots.plot_optimization_history(study))]
    complete = [trial for trial in study.get_trials(deepcopy=False) if trial.state.name == "COMPLETE"]
    if len(complete) > 1:
        evaluator = module.importance.PedAnovaImportanceEvaluator()  # the others need scikit-learn
        found.append(("Importance of the parameters", plots.plot_param_importances(study, evaluator=evaluator)))
        found.append(("Trials, as lines through their parameters", plots.plot_parallel_coordinate(study)))
    if any(trial.intermediate_values for trial in study.get_trials(deepcopy=False)):
        found.append(("Values during the trials", plots.plot_intermediate_values(study)))
    return found


def page(study: Any, title: str, table: str, trials: list[Ended]) -> str:
    """Return the HTML page. title, table: plain text."""
    writer, parts, script = plotly(), [], True
    complete = any(each.state == "COMPLETE" for each in trials)
    for name, figure in figures(study) if complete else []:
        parts.append(f"<h2>{html.escape(name)}</h2>")
        parts.append(writer.to_html(figure, full_html=False, include_plotlyjs=script))
        script = False  # the first picture has brought the script for all
    if not complete:
        parts.append("<p>No trial is complete.</p>")
    head = f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title></head>'
    body = f"<h1>{html.escape(title)}</h1>{''.join(parts)}<h2>Trials</h2><pre>{html.escape(table)}</pre>"
    return f"{head}<body>{body}</body></html>\n"


def write(path: str, text: str) -> None:
    """Write the page. Raises ArgumentError."""
    try:
        with replacing(path) as file:
            file.write(text.encode())
    except OSError as error:
        raise ArgumentError(f"--html {path}: {error.strerror or error}") from error
