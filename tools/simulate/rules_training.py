"""Invariants of starts, steps and weights; see `invariants`. Pure."""

from __future__ import annotations

from r3async.data.tokens import format_trajectory_id
from r3async.schedule.admission import max_groups_for_step
from r3async.tools.simulate.branches import leads_to, same_weights
from r3async.tools.simulate.history import Began, Installed, Published, Sent, Taken, Trained
from r3async.tools.simulate.known import Known
from r3async.tools.simulate.rules import Rule, rule

TRAINING: list[Rule] = []


# -- starts ------------------------------------------------------------------------------------------------------------


@rule(TRAINING, "lineage", Began)
def begins(known: Known, event: Began) -> str:
    """Every start takes a number that none had. It has the first `step` steps of its parent behind it: the version and the groups
    that its checkpoint names are those of these steps."""
    if event.lineage <= max(known.branches, default=0):
        return f"a start took lineage {event.lineage}, and {max(known.branches)} was taken before"
    parent = known.branches.get(event.parent)
    if event.parent and parent is None:
        return f"lineage {event.lineage} has parent {event.parent}, which never began"
    if event.step > (len(parent.steps) if parent else 0):
        return f"lineage {event.lineage} begins after step {event.step} of lineage {event.parent}, which made fewer"
    steps = parent.steps[: event.step] if parent else []
    trained = {group for step in steps for group in step.groups}
    said = {*range(event.consumed), *event.beyond}
    if said != trained:
        return f"the checkpoint of step {event.step} names groups {sorted(said)}, and its steps had {sorted(trained)}"
    newest = max((v for v, count in parent.made.items() if count <= event.step), default=0) if parent else 0
    if event.version != newest:
        return f"the checkpoint of step {event.step} names version {event.version}, and its steps made {newest}"
    return ""


@rule(TRAINING, "lineage", Taken, Trained)
def only_the_newest_trains(known: Known, event: Taken | Trained) -> str:
    """Only the newest start trains, its steps one after the other."""
    if event.lineage != known.lineage:
        return f"lineage {event.lineage} made step {event.step}, and lineage {known.lineage} has begun"
    if event.step != (made := len(known.branch.steps)) + 1:
        return f"step {event.step} came after step {made}"
    return ""


@rule(TRAINING, "checkpoint", Began)
def nothing_safe_is_passed_over(known: Known, event: Began) -> str:
    """A start resumes from the newest checkpoint that ever was safe, or a newer one."""
    if event.step < known.safe:
        return f"lineage {event.lineage} begins after step {event.step}, though the checkpoint of step {known.safe} was safe"
    return ""


# -- steps -------------------------------------------------------------------------------------------------------------


@rule(TRAINING, "twice", Taken, Trained)
def no_group_twice(known: Known, event: Taken | Trained) -> str:
    """No group, and so no trajectory, is in two steps of one branch. What a resume took back may be trained again."""
    groups = event.groups if isinstance(event, Taken) else [m[0].group for m in event.groups]
    for at, group in enumerate(groups):
        if group in known.branch.trained:
            return f"step {event.step} takes group {group}, which step {known.branch.trained[group]} trained"
        if group in groups[:at]:
            return f"step {event.step} takes group {group} twice"
    return ""


@rule(TRAINING, "whole", Trained)
def groups_are_whole(known: Known, event: Trained) -> str:
    """A step trains whole groups, each episode once and in order: as many as the schedule says, and more only to have enough
    tokens, or others in place of some."""
    rules, count = known.rules, len(event.groups)
    most = rules.slots if rules.more_groups else rules.groups_per_step + rules.replaced_groups
    if not rules.groups_per_step <= count <= most:
        return f"step {event.step} trains {count} groups, and schedule.groups_per_step is {rules.groups_per_step}"
    for members in event.groups:
        group = members[0].group
        names = [format_trajectory_id(group, i) for i in range(rules.samples_per_group)]
        if [f.trajectory_id for f in members] != names:
            return f"step {event.step} trains {[f.trajectory_id for f in members]} for group {group}"
    return ""


@rule(TRAINING, "replaced", Trained)
def groups_are_replaced_for_want_of_contrast(known: Known, event: Trained) -> str:
    """With `schedule.replaced_groups`, a step takes groups until enough of them have contrast, and stops before only where the
    budget, or what may be in flight, ends."""
    rules, branch = known.rules, known.branch
    if not rules.replaced_groups:
        return ""
    wanted, count = rules.groups_per_step, len(event.groups)
    differ = [len({f.reward for f in members if f.reward is not None}) > 1 for members in event.groups]
    since = [step for step in branch.steps if step.version == branch.version]
    in_flight = max_groups_for_step(
        slots=rules.slots,
        groups_per_step=wanted,
        steps_left=rules.steps_per_publication - len(since),
        consumed_since=sum(len(step.groups) for step in since),
    )
    budget = min(wanted + rules.replaced_groups, in_flight)
    if count > budget:
        return f"step {event.step} trains {count} groups, and may take {budget}"
    if sum(differ[:-1]) >= wanted:
        return f"step {event.step} takes group {event.groups[-1][0].group}, though {wanted} before it have contrast"
    if sum(differ) < wanted and count < budget:
        return f"step {event.step} trains {count} groups, {sum(differ)} with contrast, and may take {budget}"
    return ""


@rule(TRAINING, "task", Trained)
def a_group_plays_one_task(known: Known, event: Trained) -> str:
    """All episodes of a group play the same task, whoever plays them, and whenever."""
    for members in event.groups:
        if len(tasks := sorted({f.task for f in members})) > 1:
            return f"step {event.step} trains group {members[0].group}, whose episodes play tasks {tasks}"
    return ""


@rule(TRAINING, "window", Taken)
def groups_are_in_order(known: Known, event: Taken) -> str:
    """Each group of a step is within the window, which begins with the oldest that is not trained; and none older in it was
    complete (all its episodes acknowledged) when the step began."""
    branch, window = known.branch, known.rules.window
    gone, head = set(branch.trained), branch.head
    for group in event.groups:
        while head in gone:
            head += 1
        if group >= head + window:
            return f"step {event.step} takes group {group}, and group {head} waits: schedule.window is {window}"
        for older in range(head, group):
            if older not in gone and known.is_complete(older):
                return f"step {event.step} takes group {group}, though group {older} is complete"
        gone.add(group)
    return ""


@rule(TRAINING, "weights", Trained)
def sampled_by_its_past(known: Known, event: Trained) -> str:
    """A trained token was sampled by weights in the past of those that it changes: the steps that made them are the first
    that the learner's branch made. So by its name, (lineage, version); what its log-prob and its routes say has to fit."""
    for f in (f for members in event.groups for f in members):
        of = known.branches.get(f.lineage)
        for version in f.versions:
            if of is None or version > event.version or not leads_to(of, version, known.branch):
                return (
                    f"step {event.step} trains {f.trajectory_id}, sampled by version {version} of lineage {f.lineage}: these "
                    f"weights are not in the past of version {event.version} of lineage {event.lineage}"
                )
        if f.wrong:
            return f"step {event.step} trains {f.trajectory_id}: {f.wrong}"
    return ""


@rule(TRAINING, "content", Trained)
def trained_as_sent(known: Known, event: Trained) -> str:
    """What is trained was sent by a generator, every column as it was sent."""
    for f in (f for members in event.groups for f in members):
        if f.content not in known.sent.get(f.trajectory_id, {}):
            return f"step {event.step} trains {f.trajectory_id} as nobody sent it"
    return ""


@rule(TRAINING, "age", Trained)
def none_is_too_old(known: Known, event: Trained) -> str:
    """No trained token is older than the schedule allows, in versions."""
    for f in (f for members in event.groups for f in members):
        if f.versions and event.version - f.versions[0] > known.rules.age_bound:
            return (
                f"step {event.step} trains {f.trajectory_id}, of version {f.versions[0]}, at version {event.version}: the "
                f"schedule allows an age of {known.rules.age_bound}"
            )
    return ""


# -- weights -----------------------------------------------------------------------------------------------------------


@rule(TRAINING, "version", Taken, Trained)
def versions_count_publications(known: Known, event: Taken | Trained) -> str:
    """A version is made by `steps_per_publication` steps, or by the last ones, and counts one."""
    if event.version != known.branch.version:
        return f"step {event.step} is of version {event.version}, and {known.branch.version} versions were made"
    return ""


@rule(TRAINING, "version", Published)
def published_versions_go_up(known: Known, event: Published) -> str:
    """Published versions only go up, were made, and are of other weights than the one before if a step between made an update."""
    branch = known.branches.get(event.lineage)
    if branch is None or event.lineage != known.lineage:
        return f"version {event.version} of lineage {event.lineage} is published, and lineage {known.lineage} has begun"
    before = [v for of, v in known.published if of == event.lineage]
    if before and event.version <= max(before):
        return f"version {event.version} of lineage {event.lineage} is published after version {max(before)}"
    behind = branch.behind(event.version)
    if behind is None:
        return f"version {event.version} of lineage {event.lineage} is published, and no step made it"
    if before and (since := branch.behind(max(before))) is not None:
        updated = any(step.updates for step in behind[len(since) :])
        if updated == (known.published[event.lineage, max(before)] == event.weights):
            changed = "the same" if updated else "not the same"
            return f"version {event.version} of lineage {event.lineage} has {changed} weights as version {max(before)}"
    return ""


@rule(TRAINING, "checkpoint", Published)
def equal_steps_make_equal_weights(known: Known, event: Published) -> str:
    """What a lineage publishes is bit by bit what the same steps made in another: a checkpoint that loads is whole."""
    branch = known.branches[event.lineage]
    for (lineage, version), weights in known.published.items():
        same = same_weights(branch, event.version, known.branches[lineage], version)
        if same and weights != event.weights:
            return (
                f"version {event.version} of lineage {event.lineage} is not version {version} of lineage {lineage}, and the "
                "same steps made both"
            )
    return ""


@rule(TRAINING, "version", Installed)
def engines_install_what_was_published(known: Known, event: Installed) -> str:
    """An engine installs newer weights only, of its run's lineage, and those that were published under that name."""
    engine, name = known.engines[event.generator], f"version {event.version} of lineage {event.lineage}"
    if event.lineage != known.lineage:
        return f"{event.generator} installs {name}, and the run is of lineage {known.lineage}"
    if engine.versions and event.version < engine.versions[-1]:
        return f"{event.generator} installs {name} after version {engine.versions[-1]}"
    if (weights := known.published.get((event.lineage, event.version))) is None:
        return f"{event.generator} installs {name}, which was not published"
    if weights != event.weights:
        return f"{event.generator} installs other weights than were published as {name}"
    return ""


@rule(TRAINING, "generator", Sent)
def sent_as_sampled(known: Known, event: Sent) -> str:
    """What a generator sends was sampled by weights that this very process of it had installed, in their lineage."""
    f, engine = event.trajectory, known.engines[event.generator]
    if f.lineage != known.lineage:
        return f"{event.generator} sends {f.trajectory_id} of lineage {f.lineage}, in a run of lineage {known.lineage}"
    if strange := [v for v in f.versions if v not in engine.versions]:
        return f"{event.generator} sends {f.trajectory_id} of versions {strange}, and it has had {engine.versions}"
    return f"{event.generator} sends {f.trajectory_id}: {f.wrong}" if f.wrong else ""
