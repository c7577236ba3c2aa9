"""One checklist for every pruner and selector, ours or a user's."""

from dataclasses import dataclass

import pytest
import torch

import cps
from samples import conv_net, make_task


@cps.setting
@dataclass(frozen=True)
class EveryOther:
    """A user's pruner: every other connection."""

    offset: int = 0

    def __call__(self, backbone, masks, batches):
        return {
            n: m & (torch.arange(m.numel()).reshape(m.shape) % 2 == self.offset).to(m.device) for n, m in masks.items()
        }


@dataclass(frozen=True)
class Energy:
    """A user's selector: the mean log-sum-exp of the logits."""

    name = "Energy"

    def observe(self, subnetwork, evidence, labels, earlier):
        return {"count": torch.tensor([float(len(labels))])}

    def __call__(self, evidence, statistics, groups):
        energies = torch.stack([outputs.logits.logsumexp(dim=1) for outputs in evidence], dim=1)
        return torch.stack([energies[groups == group].mean(dim=0) for group in range(int(groups.max()) + 1)])


PRUNERS = [
    cps.NNrelief(0.9),
    cps.NNrelief(1.0),
    cps.NNrelief(0.5),
    cps.Magnitude(0.5),
    cps.Magnitude(1.0),
    EveryOther(),
]
SELECTORS = [
    cps.MaxOutput(),
    cps.ImportanceSignature(2),
    cps.ImportanceSignature(1),
    cps.Oracle(1),
    Energy(),
    cps.Cascade(),
]


@pytest.mark.parametrize("pruner", PRUNERS, ids=str)
def test_every_pruner_passes_the_checklist(pruner):
    cps.check_pruner(pruner)


@pytest.mark.parametrize("selector", SELECTORS, ids=lambda s: s.name)
def test_every_selector_passes_the_checklist(selector):
    cps.check_selector(selector)


def test_the_checklist_fails_a_pruner_that_brings_connections_back():
    class Reviving:
        def __call__(self, backbone, masks, batches):
            return {
                n: torch.ones_like(m) if not m.all() else m & (torch.arange(m.numel()).reshape(m.shape) > 0)
                for n, m in masks.items()
            }

    with pytest.raises(AssertionError, match="bring connections back"):
        cps.check_pruner(Reviving())


def test_the_checklist_fails_a_pruner_that_touches_the_network():
    class Meddling(cps.Magnitude):
        def __call__(self, backbone, masks, batches):
            with torch.no_grad():
                next(backbone.parameters()).add_(1.0)
            return super().__call__(backbone, masks, batches)

    with pytest.raises(AssertionError, match="must not change the backbone"):
        cps.check_pruner(Meddling())


def test_the_checklist_fails_a_selector_that_keeps_features():
    class Hoarding(cps.MaxOutput):
        def observe(self, subnetwork, evidence, labels, earlier):
            return {"all": evidence[-1].features}

    with pytest.raises(AssertionError, match="not its images"):
        cps.check_selector(Hoarding())


def test_the_checklist_fails_a_selector_that_mixes_groups():
    class Mixing(cps.MaxOutput):
        def __call__(self, evidence, statistics, groups):
            return super().__call__(evidence, statistics, groups).cumsum(dim=0)

    with pytest.raises(AssertionError, match="other groups"):
        cps.check_selector(Mixing())


def test_a_learner_works_with_a_users_pruner_and_selector(make_learner, tmp_path):
    learner = make_learner(pruner=EveryOther(1), selectors=(Energy(), cps.MaxOutput()))
    learner.learn(make_task(0))
    learner.learn(make_task(10))
    images = make_task(10).test[0]
    learner.save(tmp_path / "model.cps")
    with pytest.raises(ValueError, match="selectors="):
        cps.load(tmp_path / "model.cps", learner.network.backbone)
    loaded = cps.load(
        tmp_path / "model.cps", learner.network.backbone, selectors=learner.selectors, fabric=learner.fabric
    )
    assert loaded.pruner == EveryOther(1)
    assert loaded.predict(images).classes == learner.predict(images).classes


def test_max_output_is_the_formula_of_the_paper(make_learner):
    learner = make_learner()
    learner.learn(make_task(0))
    learner.learn(make_task(10))
    images = make_task(0).test[0]
    evidence = learner.evidence(images)
    sums = [outputs.logits[:5].max(dim=1).values.sum() for outputs in evidence]
    assert int(learner.predict(images[:5], group_size=5).tasks[0]) == int(torch.stack(sums).argmax())


@pytest.mark.parametrize("norm", [1, 2])
def test_the_signature_is_the_formula_of_the_paper(make_learner, norm):
    """Distance of the signed means of w_ij times feature_i, over all connections of the head (eqs. 7, 8)."""
    selector = cps.ImportanceSignature(norm)
    learner = make_learner(selectors=(selector,))
    tasks = [make_task(0), make_task(10)]
    for task in tasks:
        learner.learn(task)
    images = tasks[0].test[0][:4]
    distances = []
    for index, task in enumerate(tasks):
        weight = learner.network.subnetworks[index].head["weight"]
        stored = (weight * learner.evidence(task.train[0])[index].features[:, None]).mean(dim=0)
        now = (weight * learner.evidence(images)[index].features[:, None]).mean(dim=0)
        difference = (stored - now).flatten()
        distances.append(difference.norm() if norm == 2 else difference.abs().mean())
    scores = selector(
        learner.evidence(images),
        learner.network.statistics(selector.name),
        torch.zeros(4, dtype=torch.long).to(now.device),
    )
    torch.testing.assert_close(-scores[0], torch.stack(distances), rtol=1e-4, atol=1e-6)


class Counts(cps.MaxOutput):
    """Keeps whole numbers."""

    name = "Counts"

    def observe(self, subnetwork, evidence, labels, earlier):
        return {"counts": torch.bincount(labels)}


def test_whole_numbers_that_a_selector_keeps_survive_a_file(make_learner, tmp_path):
    cps.check_selector(Counts())
    learner = make_learner(selectors=[Counts()])
    learner.learn(make_task(0))
    learner.save(tmp_path / "model.cps")
    kept = cps.load(tmp_path / "model.cps", conv_net(), selectors=[Counts()]).network.statistics("Counts")[0]
    assert kept["counts"].tolist() == learner.network.statistics("Counts")[0]["counts"].tolist()


@pytest.mark.parametrize("kept", [{1: torch.ones(2)}, {"list": [1.0]}, {"complex": torch.ones(2) * 1j}])
def test_what_no_file_could_hold_is_refused_when_a_selector_keeps_it(make_learner, kept):
    class Odd(Counts):
        def observe(self, subnetwork, evidence, labels, earlier):
            return kept

    learner = make_learner(selectors=[Odd()])
    with pytest.raises(TypeError, match="Counts must keep real tensors by name"):
        learner.learn(make_task(0))


@pytest.mark.parametrize(
    "mask_of",
    [lambda w, m: m & (w.abs() > 0.05), lambda w, m: m.float(), lambda w, m: m[:, :1], lambda w, m: None],
    ids=["one for each weight", "floats", "too few", "none"],
)
def test_masks_of_another_form_are_refused_when_a_pruner_returns_them(make_learner, mask_of):
    def odd(backbone, masks, batches):
        weights = dict(backbone.named_parameters())
        return {name: mask_of(weights[name].detach(), mask) for name, mask in masks.items()}

    with pytest.raises(ValueError, match=r"bool mask of shape \(8, 2, 1, 1\) for '0.weight'"):
        make_learner(pruner=odd).learn(make_task(0))


class PerImage(cps.MaxOutput):
    """Scores every image, whatever its group."""

    name = "PerImage"

    def __call__(self, evidence, statistics, groups):
        return self.alone(list(evidence), statistics)


def test_scores_of_another_shape_are_refused(make_learner):
    learner = make_learner(selectors=[PerImage()])
    learner.learn(make_task(0))
    images = make_task(0).test[0]
    assert learner.predict(images).classes
    with pytest.raises(ValueError, match=r"PerImage must return scores \(groups, tasks\) \(2, 1\)"):
        learner.predict(images[:8], group_size=4)


def test_a_task_whose_scores_are_no_numbers_is_not_selected(make_learner, caplog):
    class Half(Counts):
        def __call__(self, evidence, statistics, groups):
            scores = torch.zeros(int(groups.max()) + 1, len(evidence), device=groups.device)
            scores[:, 0] = torch.nan
            return scores

    learner = make_learner(selectors=[Half()])
    learner.learn(make_task(0))
    learner.learn(make_task(10))
    assert set(learner.predict(make_task(0).test[0]).tasks.tolist()) == {1}
    assert "no numbers" in caplog.text


def test_the_checklist_fails_a_selector_whose_graph_would_select_otherwise():
    class Contrary(cps.MaxOutput):
        def __call__(self, evidence, statistics, groups):
            return -super().__call__(evidence, statistics, groups)

    with pytest.raises(AssertionError, match="`alone` must give the scores"):
        cps.check_selector(Contrary())


def test_two_selectors_of_a_name_are_not_evaluated_as_one(make_learner):
    learner, task = make_learner(), make_task(0)
    learner.learn(task)
    with pytest.raises(ValueError, match="no two of the same name"):
        cps.evaluate(learner, [task], selectors=[cps.Cascade(logit_weight=0.0), cps.Cascade(logit_weight=9.0)])
    with pytest.raises(ValueError, match="task 0 has no test images"):
        cps.evaluate(learner, [cps.Task(task.classes, task.train)])
    with pytest.raises(ValueError, match="no task to evaluate"):
        cps.evaluate(learner, [])


def test_a_selector_that_forgets_wrongly_changes_no_numbers(make_learner):
    class Same(Counts):
        def without(self, statistics, task):
            return statistics

    class Later(Same):
        name = "Later"  # so that one of the two comes after, and one before, the cascade

    learner = make_learner(selectors=[cps.Cascade(), Same(), Later()])
    for index in range(3):
        learner.learn(make_task(10 * index))
    names = ("Cascade", "Counts", "Later")
    before = {name: [dict(kept) for kept in learner.network.statistics(name)] for name in names}
    with pytest.raises(ValueError, match="Counts.without must return numbers about 2 tasks, got 3"):
        learner.forget(0)
    for name in names:
        for old, new in zip(before[name], learner.network.statistics(name), strict=True):
            assert all(old[key] is new[key] for key in old.keys() | new.keys())


def test_a_subclass_of_a_setting_is_a_setting(make_learner, tmp_path):
    @cps.setting
    class Renamed(cps.MaxOutput):
        name = "Renamed"

    learner = make_learner(selectors=[Renamed()])
    learner.learn(make_task(0))
    learner.save(tmp_path / "model.cps")
    assert cps.load(tmp_path / "model.cps", conv_net()).selectors == (Renamed(),)
