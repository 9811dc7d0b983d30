"""Which tests hold which file: those that fail soonest come first."""

A, F, T = "tests/algorithms/test_", "tests/simulator/fleet/test_", "tests/tasks/test_"
AGNOSTIC = [f"{A}drfa.py", f"{A}qffl.py", f"{A}afl.py", f"{A}afl_estimators.py"]
AVERAGING = [f"{A}averaging.py", f"{A}equivalence.py"]
FEDMM = [f"{A}fedmm.py", f"{A}fedmm_baselines.py"]
FACT = [f"{A}fact.py", f"{A}fact_clients.py", f"{A}fact_torch.py"]
MINIMAX = [f"{A}minimax_baselines.py", f"{A}cdma.py"]
PERSONAL = [f"{A}personalised.py", f"{A}own_models_by_hand.py"]
ONLINE = [f"{F}online_models.py", f"{F}online_correlated.py", f"{F}online_trace.py", f"{F}availability.py"]
RESPONSES = [f"{F}partial_work.py", f"{F}devices.py", f"{A}unreliable.py", f"{A}late.py", f"{A}events.py"]
SENT = ["tests/transforms/test_transforms.py", "tests/transforms/test_algorithms.py"]
ATTACKS = ["tests/attacks/test_updates.py", "tests/attacks/test_poison.py", "tests/front/config/test_attack_config.py"]
SECURED = ["tests/simulator/driver/test_secured.py", "tests/front/config/test_secure_aggregation.py"]
INVERTED = ["tests/front/experiments/test_inversion.py", "tests/front/commands/test_invert.py"]
BUFFER = [f"{F}buffer.py", f"{A}fedbuff.py", f"{A}events.py"]

OPTIONS = f"{A}options.py"

_HELD: dict[str, list[str]] = {
    "algorithms/afl.py": [f"{A}afl.py", f"{A}afl_estimators.py"],
    "algorithms/catalyst.py": MINIMAX,
    "algorithms/cdma.py": [f"{A}cdma.py"],
    "algorithms/coda.py": MINIMAX,
    "algorithms/control.py": [*AVERAGING, *MINIMAX],
    "algorithms/coral.py": [f"{A}domain_methods.py"],
    "algorithms/ditto.py": PERSONAL,
    "algorithms/drfa.py": AGNOSTIC[:1],
    "algorithms/extra_step.py": MINIMAX[:1],
    "algorithms/fact.py": FACT,
    "algorithms/fact_work.py": FACT[::-1],
    "algorithms/fedas.py": [f"{A}own_heads.py", f"{A}own_models_by_hand.py"],
    "algorithms/fedavg.py": AVERAGING,
    "algorithms/fedbabu.py": PERSONAL,
    "algorithms/fedbuff.py": BUFFER[1:],
    "algorithms/fedga.py": [f"{A}domain_methods.py"],
    "algorithms/fediir.py": [f"{A}generalisation.py"],
    "algorithms/fedmm.py": FEDMM[:1],
    "algorithms/fedpac.py": [f"{A}own_heads.py"],
    "algorithms/fedper.py": PERSONAL,
    "algorithms/fedprox.py": AVERAGING,
    "algorithms/fedprox_sgda.py": FEDMM,
    "algorithms/fedrep.py": PERSONAL,
    "algorithms/fedrobust.py": FEDMM[1:],
    "algorithms/fedrod.py": PERSONAL,
    "algorithms/fedsam.py": [f"{A}generalisation.py"],
    "algorithms/fedsr.py": [f"{A}fedsr.py"],
    "algorithms/gt_gda.py": FEDMM[1:],
    "algorithms/gt_hsgd.py": FEDMM[1:],
    "algorithms/irm.py": [f"{A}domain_methods.py"],
    "algorithms/keeping.py": PERSONAL,
    "algorithms/lambda_sets.py": [f"{A}lambda_sets.py", *AGNOSTIC[2:3]],
    "algorithms/local.py": [*AVERAGING, *MINIMAX],
    "algorithms/local_sgda_plus.py": MINIMAX,
    "algorithms/matching.py": [f"{A}omg.py"],
    "algorithms/mcd.py": [f"{A}mcd.py"],
    "algorithms/mixture.py": AGNOSTIC,
    "algorithms/omg.py": [f"{A}omg.py"],
    "algorithms/parallel_sgda.py": MINIMAX,
    "algorithms/penalised.py": [f"{A}domain_methods.py"],
    "algorithms/peravg.py": PERSONAL,
    "algorithms/prototypes.py": [f"{A}own_heads.py"],
    "algorithms/qffl.py": AGNOSTIC[1:2],
    "algorithms/robust.py": [f"{A}robust.py", f"{A}fltrust.py"],
    "algorithms/robust_rules.py": [f"{A}robust.py", f"{A}fltrust.py"],
    "algorithms/scaffold.py": AVERAGING,
    "algorithms/simplex_qp.py": [f"{A}own_heads.py"],
    "algorithms/stablefdg.py": [f"{A}stablefdg.py"],
    "algorithms/theory.py": MINIMAX[1:],
    "algorithms/vrex.py": [f"{A}domain_methods.py"],
    "algorithms/wrapping.py": [f"{A}omg.py", f"{A}robust.py"],
    "attacks/base.py": ATTACKS[1:],
    "attacks/collusion.py": ATTACKS[:1],
    "attacks/poison.py": ATTACKS[1:2],
    "attacks/updates.py": ATTACKS[:1],
    "tasks/adapters.py": [f"{T}adapters.py"],
    "tasks/adaptation.py": [f"{T}adaptation.py"],
    "tasks/adaptation_nets.py": [f"{T}adaptation.py", f"{T}pretrained.py"],
    "tasks/adversaries.py": [f"{T}adaptation.py"],
    "tasks/alike.py": [f"{A}domain_methods.py", f"{A}generalisation.py"],
    "tasks/attentive.py": [f"{T}attentive.py", f"{A}stablefdg.py"],
    "tasks/auc.py": [f"{T}auc.py"],
    "tasks/body_and_head.py": [f"{T}classification.py", f"{A}own_heads.py"],
    "tasks/classification.py": [f"{T}classification.py"],
    "tasks/gan.py": [f"{T}gan.py"],
    "tasks/gan_nets.py": [f"{T}gan.py"],
    "tasks/language.py": [f"{T}language.py"],
    "tasks/losses.py": [f"{T}objectives.py"],
    "tasks/mixstyle.py": [f"{T}mixstyle.py"],
    "tasks/own_heads.py": [f"{A}own_heads.py", f"{A}personalised.py"],
    "tasks/peft_files.py": [f"{T}adapters.py"],
    "tasks/pooling.py": [f"{T}pooling.py"],
    "tasks/pretrained.py": [f"{T}pretrained.py"],
    "tasks/robust.py": [f"{T}robust.py"],
    "tasks/scores.py": [f"{T}gan.py"],
    "tasks/shifted.py": FEDMM[1:],
    "tasks/stateful.py": [f"{T}stateful.py"],
    "tasks/stochastic.py": [f"{T}stochastic.py", f"{A}fedsr.py"],
    "tasks/styles.py": [f"{T}styles.py", f"{A}stablefdg.py"],
    "tasks/transformer.py": [f"{T}adapters.py"],
    "tasks/two_heads.py": [f"{T}two_heads.py"],
    "tasks/two_heads_nets.py": [f"{T}two_heads.py", f"{T}pretrained.py"],
    "transforms/clip.py": ["tests/transforms/test_clip.py"],
    "transforms/half.py": SENT[:1],
    "transforms/quantised.py": SENT[:1],
    "transforms/rotation.py": SENT[:1],
    "transforms/sparse.py": SENT[:1],
    "transforms/vectors.py": SENT,
    "simulator/block/unrolled.py": INVERTED[:1],
    "simulator/block/uplink.py": SENT,
    "simulator/block/forged.py": ATTACKS[:1],
    "simulator/block/masked.py": SECURED[:1],
    "simulator/driver/attacked.py": ATTACKS[:1],
    "simulator/attackers.py": ATTACKS[2:],
    "simulator/poisoned.py": ATTACKS[1:2],
    "simulator/arithmetic/reduction.py": ["tests/simulator/arithmetic/test_reduction.py"],
    "simulator/arithmetic/stored.py": ["tests/simulator/arithmetic/test_reduction.py"],
    "simulator/driver/masks.py": ["tests/simulator/driver/test_masks.py"],
    "simulator/driver/secured.py": SECURED,
    "simulator/driver/downlink.py": ["tests/transforms/test_downlink.py"],
    "simulator/driver/examples.py": ["tests/simulator/driver/test_examples.py"],
    "simulator/driver/overheard.py": INVERTED[:1],
    "simulator/driver/privacy.py": ["tests/simulator/driver/test_privacy.py"],
    "simulator/fleet/availability.py": ONLINE[3:],
    "simulator/fleet/buffer.py": BUFFER,
    "simulator/fleet/devices.py": RESPONSES,
    "simulator/fleet/flights.py": BUFFER,
    "simulator/fleet/hardware.py": [f"{F}devices.py"],
    "simulator/fleet/idle.py": BUFFER,
    "simulator/fleet/late.py": [f"{A}late.py", f"{A}events.py"],
    "simulator/fleet/online/correlated.py": ONLINE[1:2],
    "simulator/fleet/online/diurnal.py": ONLINE[:1],
    "simulator/fleet/online/markov.py": ONLINE[:1],
    "simulator/fleet/online/random_rate.py": [*ONLINE[:1], *ONLINE[3:]],
    "simulator/fleet/online/trace.py": ONLINE[2:3],
    "simulator/fleet/policies.py": [*ONLINE[3:], *RESPONSES],
    "simulator/fleet/responses.py": [*ONLINE[3:], *RESPONSES],
    "simulator/fleet/secagg.py": [f"{F}secagg.py"],
    "simulator/secure.py": SECURED,
    "simulator/fleet/selection.py": [f"{F}selection.py"],
}

TARGETS = {
    file: [OPTIONS, *([f"{T}objectives.py"] if file.startswith("tasks/") else []), *tests]
    if file.startswith(("algorithms/", "tasks/", "transforms/", "attacks/"))
    else tests
    for file, tests in _HELD.items()
}
"""File -> tests. Those of algorithms, tasks, transforms and attacks have options, whose defaults and bounds one test holds."""
