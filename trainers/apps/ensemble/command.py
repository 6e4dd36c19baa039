"""`python -m trainers --members N`: trains an ensemble, tests the vote of its members, and saves one file."""

import argparse
import math
from importlib import import_module
from typing import Any

from trainers import datasets
from trainers.cli import results
from trainers.cli.main import Job, Member, check_loss, checkpoint_of, introduce, say
from trainers.cli.options import make_callbacks, make_network, step_options, strategy_options, trainer_options
from trainers.replicas.numpy.network import NumpyNetwork

TRAINER = "trainers.apps.ensemble.ensemble"  # the module of EnsembleTrainer, imported when it is needed


def train(job: Job, member: Member) -> None:
    """Train, test and write the results. Collective over the ranks that train."""
    options, data = job.options, job.data
    assert isinstance(data, datasets.Dataset)  # see cli.main.check

    def make(seed: int) -> NumpyNetwork:
        return make_network(argparse.Namespace(**{**vars(options), "seed": seed}), data)

    with import_module(TRAINER).EnsembleTrainer(
        make,
        options.members,
        bagging=options.bagging,
        topology=member.topology,
        trainer=trainer_options(options),
        seed=options.seed,
        voting=options.voting,
    ) as ensemble:
        introduce(job, member, [_about(ensemble, options)])
        ensemble.fit(
            data.x_train,
            data.y_train,
            options.epochs,
            options.batch_size,
            callbacks=lambda _: make_callbacks(options),
            checkpoint=checkpoint_of(options),
            resume=options.resume,
            progress=job.stream,
            **step_options(options),
        )
        _finish(job, ensemble, data)


def _about(ensemble: Any, options: argparse.Namespace) -> str:
    count, parts = options.members, min(options.members, ensemble.topology.size)
    rows = {None: "all rows", "rows": "a bootstrap sample of the rows", "shards": "a shard of the rows"}
    return (
        f"ensemble: {count} member{'s' * (count != 1)} on {parts} part{'s' * (parts != 1)} of the ranks, each trained "
        f"on {rows[options.bagging]}; {options.voting} voting"
    )


def _finish(job: Job, ensemble: Any, data: datasets.Dataset) -> None:
    """Test, save, and write the results. Collective."""
    options, stream = job.options, job.stream
    scores, own = ensemble.evaluate(data.x_test, data.y_test), ensemble.evaluate_members(data.x_test, data.y_test)
    check_loss(scores.get("loss", math.nan), ensemble.topology)  # outputs with NaN have no loss
    if options.save:
        ensemble.save(options.save)
        say(ensemble.topology, f"saved: {options.save}", stream)
    accuracies = {number: each["accuracy"] for number, each in own.items()}
    best = max(accuracies, key=lambda number: accuracies[number])
    mean = sum(accuracies.values()) / len(accuracies)
    if options.json:
        found = _result(job, ensemble, scores, own) | {"mean_member_accuracy": mean, "best_member": best}
        ensemble.group.on_one(lambda: results.write_json(options.json, found))
    lines = [f"missing: member {number + 1}: {reason}" for number, reason in ensemble.missing.items()]
    if "accuracy" in ensemble.oob:
        lines.append(f"out-of-bag accuracy: {ensemble.oob['accuracy']:.4f} ({ensemble.oob['rows']:.0f} rows)")
    lines.append(f"members: mean test accuracy {mean:.4f}, best {accuracies[best]:.4f} (member {best + 1})")
    lines.append(f"test accuracy: {scores['accuracy']:.4f}")
    say(ensemble.topology, "\n".join(lines), stream)


def _result(job: Job, ensemble: Any, scores: dict[str, float], own: dict[int, dict[str, float]]) -> dict[str, Any]:
    """Return the content of --json, without the mean and the best member."""
    options = job.options
    names = ("data", "bagging", "voting", "epochs", "batch_size", "seed")
    return {
        "test_accuracy": scores["accuracy"],
        "test_loss": scores["loss"],
        "oob": ensemble.oob,
        "members": [
            {
                "seed": each.seed,
                "error": each.error,
                "history": [epoch.as_dict() for epoch in each.history],
                **{f"test_{name}": value for name, value in own.get(each.number, {}).items()},
            }
            for each in ensemble.members
        ],
        **{name: value for name, value in strategy_options(options).items() if name != "members"},
        **{name: getattr(options, name) for name in names},
        "ranks": ensemble.topology.size,
        "nodes": ensemble.topology.nodes,
    }
