"""One image is enough: the cascade, streams, and images that were never learned."""

import copy
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributions import MultivariateNormal

import cps
from cps.data.rotations import class_logits, views_of
from cps.network.outputs import Evidence, Outputs
from cps.network.subnetwork import Subnetwork
from cps.runtime.devices import full_precision
from cps.selection.base import best_task, select
from cps.selection.cascade import _unpacked
from cps.selection.components import components_of, evened
from cps.selection.groups import mean_by_group
from cps.selection.rejection import rejection_score
from cps.selection.stream import RATES, STRAY, Stream
from samples import make_task, use_all_compact

TASKS, CLASSES, FEATURES = 4, 3, 12


def world(seed=0):
    """Return what the subnetworks say about images of each task: in its own, classes lie along the head's directions.

    Images of other tasks excite a head as much as its own do, but lie at places of their own among the features, so the
    largest output cannot tell tasks apart, and images of later tasks in earlier subnetworks can.
    """
    draws = torch.Generator().manual_seed(seed)
    heads = torch.randn(TASKS, CLASSES, FEATURES, generator=draws)
    places = torch.randn(TASKS, TASKS, CLASSES, FEATURES, generator=draws).abs()  # by subnetwork, task and class
    subnetworks = [
        Subnetwork(tuple(range(10 * t, 10 * t + CLASSES)), {}, {}, {"weight": heads[t], "bias": torch.zeros(CLASSES)})
        for t in range(TASKS)
    ]

    def evidence(task, until, images):
        labels = torch.arange(images) % CLASSES
        said = []
        for s in range(until):
            features = (places[s, task][labels] + 0.2 * torch.randn(images, FEATURES, generator=draws)).clamp(min=0)
            logits = torch.randn(images, CLASSES, generator=draws)
            said.append(Outputs(features, logits))
        return Evidence(lambda tasks: [said[t] for t in tasks], until), labels

    return subnetworks, evidence


def observed(selector, subnetworks, evidence, images=60):
    statistics = []
    for task, subnetwork in enumerate(subnetworks):
        seen, labels = evidence(task, task + 1, images)
        statistics.append(selector.observe(subnetwork, seen, labels, statistics))
    return statistics


def share_found(selector, subnetworks, evidence):
    statistics = observed(selector, subnetworks, evidence)
    found = [select(selector, evidence(t, TASKS, 60)[0], statistics, torch.arange(60)).tasks == t for t in range(TASKS)]
    return torch.cat(found).float().mean()


def test_the_cascade_finds_tasks_by_what_later_images_looked_like_in_earlier_subnetworks():
    assert share_found(cps.Cascade(), *world()) > 0.95
    assert share_found(cps.MaxOutput(), *world()) < 0.5  # the outputs alone tell nothing


def test_a_cascade_whose_spreads_are_all_alike_is_a_chain_of_linear_discriminants():
    subnetworks, evidence = world()
    selector = cps.Cascade(
        size=4, shrinkage=0.1, covariance_pooling=1.0, mean_contraction=1.0, logit_weight=0.0, temperature=2.0
    )
    statistics = observed(selector, subnetworks, evidence)
    seen, _ = evidence(1, TASKS, 30)
    numbers = torch.cat([evened(o.features) @ kept["components"] for o, kept in zip(seen, statistics, strict=True)], 1)
    means = [kept["means"] for kept in statistics]
    spreads = [_unpacked(kept["covariance"], kept["means"].shape[1]) for kept in statistics]
    rejected, expected = torch.zeros(30), []
    for stage, outputs in enumerate(seen):
        n = means[stage].shape[1]
        centres = torch.cat([values[:, :n] for values in means[stage:]])
        spread = torch.stack([values[:n, :n] for values in spreads[stage:]]).mean(dim=0)
        spread = spread + 0.1 * spread.diagonal().mean() * torch.eye(n)
        weights = torch.linalg.solve(spread, centres.T)
        likely = (numbers[:, :n] @ weights - (centres.T * weights).sum(dim=0) / 2) / 2.0
        share = outputs.logits.log_softmax(dim=1).amax(dim=1)
        if stage == TASKS - 1:
            expected.append(rejected + share)
            break
        odds = likely[:, :CLASSES].logsumexp(dim=1) - likely[:, CLASSES:].logsumexp(dim=1)
        expected.append(rejected + nn.functional.logsigmoid(odds) + share)
        rejected = rejected + nn.functional.logsigmoid(-odds)
    found = selector(seen, statistics, torch.arange(30))
    torch.testing.assert_close(found, torch.stack(expected, 1), rtol=1e-3, atol=1e-3)
    for other in (
        replace(selector, covariance_pooling=0.5),
        replace(selector, mean_contraction=0.5),
    ):  # which do make a difference
        assert not torch.allclose(other(seen, statistics, torch.arange(30)), found, rtol=1e-2, atol=1e-2)


def test_a_cascade_whose_spreads_differ_compares_normal_distributions():
    subnetworks, evidence = world()
    selector = cps.Cascade(size=4, shrinkage=0.1, covariance_pooling=0.4, logit_weight=0.0, temperature=1.0)
    statistics = observed(selector, subnetworks[:2], evidence)
    seen, _ = evidence(0, 2, 30)
    outputs = next(iter(seen))
    numbers = evened(outputs.features) @ statistics[0]["components"]
    n = numbers.shape[1]
    spreads = [_unpacked(kept["covariance"], kept["means"].shape[1])[:n, :n] for kept in statistics]
    common = (spreads[0] + spreads[1]) / 2
    ridge = 0.1 * common.diagonal().mean() * torch.eye(n)
    likely = []
    for kept, spread in zip(statistics, spreads, strict=True):
        normal = [MultivariateNormal(mean[:n], 0.4 * common + 0.6 * spread + ridge) for mean in kept["means"]]
        likely.append(torch.stack([one.log_prob(numbers) for one in normal]).logsumexp(dim=0))
    found = selector(seen, statistics, torch.arange(30))[:, 0] - outputs.logits.log_softmax(dim=1).amax(dim=1)
    expected = nn.functional.logsigmoid(likely[0] - likely[1])
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("covariance_pooling", 1.2), ("covariance_pooling", -0.1), ("mean_contraction", 0.0), ("mean_contraction", 1.1), ("size", 0), ("shrinkage", 0.0),
        ("temperature", -1.0), ("logit_weight", -0.5),
    ],
)  # fmt: skip
def test_what_no_cascade_can_have_is_refused_by_name(name, wrong):
    with pytest.raises(ValueError, match=f"^{name} of Cascade must be .*, got {wrong}$"):
        cps.Cascade(**{name: wrong})


def test_the_cascade_keeps_sums_whose_size_does_not_depend_on_the_number_of_images():
    few, many = (observed(cps.Cascade(size=4), *world(), images=images) for images in (30, 300))
    assert [{k: v.shape for k, v in kept.items()} for kept in few] == [
        {k: v.shape for k, v in kept.items()} for kept in many
    ]
    assert [kept["means"].shape for kept in few] == [(CLASSES, 4 * (task + 1)) for task in range(TASKS)]


def test_what_the_cascade_says_after_some_tasks_is_what_it_said_then():
    subnetworks, evidence = world()
    selector = cps.Cascade()
    statistics = observed(selector, subnetworks, evidence)
    seen, _ = evidence(0, TASKS, 30)
    then = selector(seen.until(2), statistics[:2], torch.arange(30))
    assert then.shape == (30, 2)
    now = selector(seen, statistics, torch.arange(30))
    assert not torch.equal(now[:, :2], then)  # later tasks have taught it what is not its own


@pytest.fixture(scope="module")
def learner():
    training = cps.Training(20, cps.Adam(1e-2), batch_size=16)
    torch.manual_seed(0)
    learner = cps.Learner(
        cps.SmallConvNet(2, (8, 12)), rounds=1, train=training, retrain=training,
        selectors=(cps.Cascade(size=8), cps.MaxOutput()), fabric=cps.make_fabric(accelerator="cpu"),
    )  # fmt: skip
    for first in (0, 10, 20):
        task = make_task(first, images=60, test=60)
        learner.learn(cps.Task(task.classes, train=task.train, val=task.test))
    return learner


def test_a_learner_with_a_cascade_survives_its_file(learner, tmp_path):
    learner.save(tmp_path / "model.cps")
    loaded = cps.load(tmp_path / "model.cps", cps.SmallConvNet(2, (8, 12)), fabric=learner.fabric)
    images = make_task(10, test=30).test[0]
    assert loaded.predict(images).classes == learner.predict(images).classes
    assert loaded.selectors == learner.selectors


def test_an_image_unlike_all_that_was_learned_is_unknown_and_the_share_of_known_ones_is_as_asked(learner):
    own = torch.cat([make_task(first, test=60).test[0] for first in (0, 10, 20)])
    strange = torch.zeros(40, 2, 6, 6) + 0.01 * torch.randn(40, 2, 6, 6, generator=torch.Generator().manual_seed(0))
    unknown = [name is None for name in learner.predict(strange, reject=0.1).classes]
    assert sum(unknown) > 30
    rejected = sum(name is None for name in learner.predict(own, reject=0.1).classes) / len(own)
    assert 0.05 < rejected < 0.2
    assert None not in learner.predict(strange).classes
    with pytest.raises(ValueError, match="share of known images"):
        learner.predict(own, reject=1.0)


def test_it_is_said_once_that_training_images_are_no_measure_of_how_familiar_new_ones_look(learner, caplog):
    images = make_task(0).test[0]
    kept = [subnetwork.statistics["familiarity"]["are_new"] for subnetwork in learner.network.subnetworks]
    assert not any(kept)  # few images were held out, so training images were looked at too
    learner.network.warned.clear()
    for value in kept:
        value.fill_(1)
    learner.predict(images, reject=0.1)
    assert not caplog.records  # the negative control
    for value in kept:
        value.zero_()
    for _ in range(2):
        learner.predict(images, reject=0.1)
    assert [record.message[:48] for record in caplog.records] == ["how familiar images look was measured on trainin"]


def test_familiarity_goes_on_below_the_least_familiar_image_of_a_task(learner):
    kept = learner.network.subnetworks[0].statistics["familiarity"]["quantiles"]
    largest = torch.stack([kept[0] - 2, kept[0] - 1, kept[100], kept[500], kept[1000] + 1])
    evidence = Evidence(lambda tasks: [Outputs(largest, largest[:, None].expand(-1, 2)) for _ in tasks], 3)
    found = rejection_score(learner.network, evidence, torch.zeros(5, dtype=torch.long)).tolist()
    assert found[0] < found[1] < 0
    assert found[2:] == pytest.approx([100, 500, 1000], abs=10)  # few images share some of the quantiles


def test_a_stream_finds_the_task_of_doubtful_images_by_those_before_them(learner):
    draws = torch.Generator().manual_seed(3)
    clear = {first: make_task(first, test=60).test[0] for first in (0, 10, 20)}
    order = torch.arange(3).repeat_interleave(40)
    images = torch.cat([images[:40] for images in clear.values()])
    images = images + 0.6 * torch.randn(images.shape, generator=draws)  # so that one image says little
    alone = (learner.predict(images).tasks == order).float().mean()
    stream = learner.stream()
    followed = torch.cat([stream.predict(part).tasks for part in images.split(7)])
    assert (followed == order).float().mean() > alone + 0.05
    assert stream.tasks.shape == (3,)
    torch.testing.assert_close(stream.tasks.sum(), torch.tensor(1.0))
    again = learner.stream().predict(images)
    assert torch.equal(again.tasks, followed)  # how images are cut into calls makes no difference


def test_a_stream_can_reject_images_too(learner):
    images = make_task(0).train[0]
    assert None not in learner.stream().predict(images).classes
    rejected = learner.stream().predict(images, reject=0.5)
    assert 0 < sum(name is None for name in rejected.classes) < len(images)


def test_a_stream_starts_anew_when_another_task_has_been_learned(learner):
    stream = learner.stream(selector=cps.MaxOutput())
    before = learner.network.subnetworks
    learner.network.subnetworks = before[:2]
    stream.predict(make_task(0).test[0])
    assert stream.tasks.shape == (2,)
    learner.network.subnetworks = before
    stream.predict(make_task(0).test[0])
    assert stream.tasks.shape == (3,)


@pytest.mark.parametrize("stray", [STRAY, 0.0])
def test_one_image_in_a_stream_does_not_undo_many_however_sure_it_is(learner, monkeypatch, stray):
    monkeypatch.setattr("cps.selection.stream.STRAY", stray)
    scores = torch.tensor([[1.0, 0.0, 0.0]] * 30 + [[0.0, 300.0, 0.0]] + [[1.0, 0.0, 0.0]] * 3)
    said = [Outputs(scores, scores[:, [task]].expand(-1, 2)) for task in range(3)]
    evidence = Evidence(lambda tasks: [said[task] for task in tasks], 3)
    tasks = learner.stream(selector=cps.MaxOutput()).predict_by(evidence).tasks
    assert tasks[-1] == (0 if stray else 1)  # the negative control: taken at its word it decides alone
    assert STRAY > 0


def test_a_stream_that_was_calm_for_long_still_notices_changes():
    stream = Stream(SimpleNamespace(), cps.MaxOutput(), None)
    stream._rates = torch.full((len(RATES),), 1 / len(RATES), dtype=torch.float64)
    stream._tasks = torch.full((len(RATES), 3), 1 / 3, dtype=torch.float64)
    said = torch.full((3, 3), 0.15, dtype=torch.float64).fill_diagonal_(0.7)
    for _ in range(20_000):
        stream._follow(said[0])
    for task in (0, 1) * 20:  # a change with each image
        found = stream._follow(said[task])
    assert found.argmax() == 1


def test_a_cascade_without_a_task_is_one_that_never_saw_it():
    subnetworks, evidence = world()
    seen = {(t, n): evidence(t, n, 60) for t in range(TASKS) for n in (t + 1, TASKS)}
    selector, gone = cps.Cascade(), 1

    def left_out(found):
        return Evidence(lambda tasks: [found.ask(range(len(found)))[t + (t >= gone)] for t in tasks], len(found) - 1)

    whole, never = [], []
    for task in range(TASKS):
        found, labels = seen[task, task + 1]
        whole.append(selector.observe(subnetworks[task], found, labels, whole))
        if task != gone:
            rest = left_out(found) if task > gone else found
            never.append(selector.observe(subnetworks[task], rest, labels, never))
    for kept, wanted in zip(selector.without(whole, gone), never, strict=True):
        assert {name: value.shape for name, value in kept.items()} == {n: v.shape for n, v in wanted.items()}
        torch.testing.assert_close(kept, wanted)


def test_the_cascade_notices_when_its_numbers_are_others():
    subnetworks, evidence = world()
    selector = cps.Cascade()
    statistics = observed(selector, subnetworks, evidence)
    seen, _ = evidence(0, TASKS, 30)
    first = selector(seen, statistics, torch.arange(30))
    assert torch.equal(selector(seen, statistics, torch.arange(30)), first)
    changed = [{**statistics[0], "means": statistics[0]["means"] + 1}, *statistics[1:]]
    assert not torch.allclose(selector(seen, changed, torch.arange(30)), first)
    assert not torch.allclose(cps.Cascade(temperature=1.0)(seen, statistics, torch.arange(30)), first)
    assert torch.equal(selector(seen, statistics, torch.arange(30)), first)


def test_tasks_learned_in_other_views_answer_together(make_learner):
    learner = make_learner(rotations=cps.Upright(flips=True))
    for first, rotations in ((0, cps.Upright(flips=True)), (10, cps.Rotations()), (20, cps.Upright())):
        learner.rotations = rotations
        learner.learn(make_task(first))
    use_all_compact(learner)
    images = make_task(0).test[0]
    with full_precision():
        for task, outputs in enumerate(learner.network.outputs([images], range(3))):
            expected = learner.network.whole_outputs([images], task).logits
            torch.testing.assert_close(outputs.logits, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("images", [1, 5, 33])
def test_a_later_task_with_other_looks_changes_no_bit_of_what_earlier_ones_see(make_learner, images):
    learner, seen = make_learner(), torch.randn(images, 2, 6, 6, generator=torch.Generator().manual_seed(0))

    def learn(first, rotations):
        learner.rotations = rotations
        learner.learn(make_task(first))
        use_all_compact(learner)

    learn(0, cps.Upright())
    before = learner.evidence(seen)[0]
    for first, rotations in ((10, cps.Upright()), (20, cps.Rotations(flips=True))):
        learn(first, rotations)
        assert all(map(torch.equal, learner.evidence(seen)[:][0], before))


@pytest.mark.parametrize(("num_rotations", "flips"), [(1, False), (1, True), (4, False), (4, True)])
def test_each_look_has_outputs_of_its_own_to_the_bit_that_model_files_hold_the_digests_of(num_rotations, flips):
    views, draws = views_of(num_rotations, flips), torch.Generator().manual_seed(0)
    features, weight = (
        torch.randn(len(views), 4, 37, generator=draws),
        torch.randn(3 * num_rotations, 37, generator=draws),
    )
    bias = torch.randn(3 * num_rotations, generator=draws)
    said = [torch.nn.functional.linear(features[i], weight[view.rotation :: num_rotations], bias[view.rotation :: num_rotations])
            for i, view in enumerate(views)]  # fmt: skip
    expected = said[0] if len(said) == 1 else torch.stack(said).mean(dim=0)
    assert torch.equal(class_logits(features, views, weight, bias), expected)


@pytest.mark.parametrize(("number", "sizes"), [(1, [8]), (12, [96]), (70, [256, 256, 48])])
def test_few_images_pass_in_all_looks_at_once_and_many_in_stretches(make_learner, monkeypatch, number, sizes):
    learner = make_learner(rotations=cps.Rotations(flips=True))
    learner.learn(make_task(0))
    images, passed = torch.randn(number, 2, 6, 6, generator=torch.Generator().manual_seed(0)), []
    learner.network.backbone.register_forward_hook(lambda _module, given, _features: passed.append(len(given[0])))
    with full_precision():
        found = learner.network.whole_outputs([images], 0)
        assert passed == sizes
        monkeypatch.setattr("cps.network.shared.AT_ONCE", 1)
        one_by_one = learner.network.whole_outputs([images], 0)
    assert passed[len(sizes) :] == [8] * number
    torch.testing.assert_close(found.logits, one_by_one.logits, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(found.features, one_by_one.features, rtol=1e-3, atol=1e-3)


def test_a_cascade_for_tasks_that_it_has_not_seen_is_refused_before_training(make_learner):
    learner = make_learner(selectors=(cps.MaxOutput(),))
    learner.learn(make_task(0))
    learner.selectors = (cps.Cascade(),)
    with pytest.raises(ValueError, match="from the first task on"):
        learner.learn(make_task(10))


def test_numbers_of_selectors_that_are_not_at_hand_go_with_a_forgotten_task(make_learner):
    learner = make_learner()
    for first in (0, 10):
        learner.learn(make_task(first))
    learner.selectors = (cps.MaxOutput(),)
    learner.forget(0)
    assert set(learner.network.subnetworks[0].statistics) == {"MaxOutput", "familiarity"}


def test_images_held_out_are_looked_at_before_training(make_learner):
    task = make_task(0)
    learner = make_learner(watch=lambda at: pytest.fail("it has begun to train"))
    with pytest.raises(ValueError, match="is not one of the task's classes"):
        learner.learn(cps.Task(task.classes, train=task.train, val=(task.test[0][:2], [0, 7])))


def test_a_covariance_of_a_wrong_size_is_refused_before_memory_is_taken():
    subnetworks, evidence = world()
    statistics = observed(cps.Cascade(), subnetworks, evidence)
    hostile = [{**statistics[0], "means": torch.zeros(2, 500_000)}, *statistics[1:]]
    with pytest.raises(ValueError, match="entries, got"):
        cps.Cascade()(evidence(0, TASKS, 3)[0], hostile, torch.arange(3))


def test_an_image_without_a_sound_score_says_nothing_to_a_stream(learner):
    class Unsure(cps.MaxOutput):
        def __call__(self, evidence, statistics, groups):
            scores = super().__call__(evidence, statistics, groups)
            scores[1] = torch.nan
            return scores

    images = make_task(0).test[0][:6]
    stream = learner.stream(selector=Unsure())
    found = stream.predict(images).tasks
    assert stream.tasks.isfinite().all()
    assert torch.equal(found, learner.stream(selector=cps.MaxOutput()).predict(images).tasks)


def test_a_call_that_is_refused_does_not_move_a_stream(learner):
    stream = learner.stream()
    stream.predict(make_task(0).test[0])
    before = stream.tasks
    with pytest.raises(ValueError, match="reject is the share"):
        stream.predict(make_task(10).test[0], reject=2)
    assert torch.equal(stream.tasks, before)


def test_a_task_without_a_sound_score_is_not_selected():
    scores = torch.tensor([[1.0, torch.nan], [torch.nan, -torch.inf], [0.0, 1.0]])
    assert best_task(scores).tolist() == [0, 1, 1]


def test_a_stream_starts_anew_when_a_task_was_forgotten(learner):
    learner = copy.deepcopy(learner)
    stream = learner.stream(selector=cps.MaxOutput())
    stream.predict(make_task(0).test[0])
    learner.forget(2)
    stream.predict(make_task(0).test[0])
    assert stream.tasks.shape == (2,)


def test_a_cascade_that_is_launched_gives_the_same_scores_and_keeps_one_graph(make_learner, monkeypatch):
    made = []

    class Plain:  # on a GPU this is captured
        def __init__(self, work):
            self.work = work
            made.append(self)

        def __call__(self, *inputs):
            return self.work(*inputs)

    monkeypatch.setattr("cps.selection.cascade.Captured", Plain)
    learner, cascade, images = make_learner(), cps.Cascade(), make_task(0).test[0]
    for first in (0, 10, 20):
        learner.learn(make_task(first))
        statistics, evidence = learner.network.statistics("Cascade"), list(learner.evidence(images))
        for _ in range(2):
            ready = cascade._kept_ready(statistics)
            assert torch.equal(cascade._launched(evidence, ready, statistics), cascade.alone(evidence, ready))
    assert len(made) == 3
    gone = weakref.ref(made.pop(0))
    assert gone() is None


class Told:
    """A selector that gives one image as told."""

    name = "Told"

    def __call__(self, evidence, statistics, groups):
        return mean_by_group(torch.tensor([[1.0, 0.0]]).expand(len(groups), 2), groups)


@pytest.mark.parametrize("size", [1, 4, 9])
def test_a_group_that_agrees_is_surer_than_one_image_but_not_as_if_each_were_new(size):
    evidence = Evidence(lambda tasks: [Outputs(torch.zeros(9, 3), torch.zeros(9, 2)) for _ in tasks], 2)
    groups = torch.arange(9) // size
    found = select(Told(), evidence, [{}, {}], groups)
    torch.testing.assert_close(found.share, groups.bincount().sqrt()[groups].sigmoid())
    assert found.tasks.tolist() == [0] * 9


@pytest.mark.parametrize(("images", "features"), [(30, 1100), (400, 1500)])
def test_of_many_features_the_main_components_are_found_without_a_matrix_of_all(images, features, monkeypatch):
    draws = torch.Generator().manual_seed(0)
    mixed = torch.randn(images, 20, generator=draws) @ torch.randn(20, features, generator=draws)
    seen = evened(mixed + torch.randn(images, features, generator=draws))
    _, exact = torch.linalg.eigh((seen - seen.mean(0)).T.double().cov())
    sizes, real = [], torch.linalg.eigh
    monkeypatch.setattr(torch.linalg, "eigh", lambda matrix: sizes.append(len(matrix)) or real(matrix))
    found = components_of(seen, 8)
    assert sizes == [16]
    torch.testing.assert_close(found.T @ found, torch.eye(8), atol=1e-5, rtol=0)
    assert seen.matmul(found).var(0).sum() > 0.999 * seen.double().matmul(exact[:, -8:]).var(0).sum()
    assert torch.equal(found, components_of(seen, 8))
