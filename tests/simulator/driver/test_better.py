"""Directions of metrics: which way is better, by the name."""

from fedfleet.simulator.driver.evaluation import less_is_better

LESS = "loss error mse nll perplexity regret duality_gap misclassified wrong_words transport_cost distance kl_divergence kl risk"
MORE = "accuracy auc inception_score score distance_score mission_success confidence recall mission psnr loss_score"


def test_less_is_better_and_of_others_more_but_of_a_spread():
    for name in [*LESS.split(), "entropy"]:
        assert all(map(less_is_better, (name, f"eval/train_{name}", f"eval/{name}_worst_domain"))), name
    for name in [*MORE.split(), "information", "density"]:
        assert not any(map(less_is_better, (f"eval/{name}", f"eval/{name}_worst_tenth"))), name
        assert all(map(less_is_better, (f"eval/{name}_spread", f"eval/gap_{name}"))), name


def test_a_task_says_it_by_the_end_of_a_name():
    assert less_is_better("eval/agreement_loss")
    assert not less_is_better("eval/error_score")
