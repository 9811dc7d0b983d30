"""The papers of algorithms for unseen domains, and for a domain without labels but FedMM's."""

from __future__ import annotations

from collections.abc import Mapping

from fedfleet.algorithms.bibtex import Paper

_DOMAINBED = Paper(
    "gulrajani2021search",
    "Gulrajani, Ishaan and Lopez-Paz, David",
    "In Search of Lost Domain Generalization",
    "ICLR",
    2021,
)
_SAM = Paper(
    "qu2022generalized",
    "Qu, Zhe and Li, Xingyu and Duan, Rui and Liu, Yao and Tang, Bo and Lu, Zhuo",
    "Generalized Federated Learning via Sharpness Aware Minimization",
    "ICML",
    2022,
)
OF_DOMAINS: Mapping[str, tuple[Paper, ...]] = {
    "omg": (
        Paper(
            "nguyen2025federated",
            "Nguyen, Trong-Binh and Nguyen, Minh-Duong and Park, Jinsun and Pham, Quoc-Viet and Hwang, Won Joo",
            "Federated Domain Generalization with Data-free On-server Matching Gradient",
            "ICLR",
            2025,
        ),
    ),
    "fedsam": (_SAM,),
    "mofedsam": (_SAM,),
    "fediir": (
        Paper(
            "guo2023out",
            "Guo, Yaming and Guo, Kai and Cao, Xiaofeng and Wu, Tieru and Chang, Yi",
            "Out-of-Distribution Generalization of Federated Learning via Implicit Invariant Relationships",
            "ICML",
            2023,
        ),
    ),
    "fedga": (
        Paper(
            "zhang2023federated",
            "Zhang, Ruipeng and Xu, Qinwei and Yao, Jiangchao and Zhang, Ya and Tian, Qi and Wang, Yanfeng",
            "Federated Domain Generalization with Generalization Adjustment",
            "CVPR",
            2023,
        ),
    ),
    "fedsr": (
        Paper(
            "nguyen2022fedsr",
            "Nguyen, A. Tuan and Torr, Philip and Lim, Ser-Nam",
            "{FedSR}: A Simple and Effective Domain Generalization Method for Federated Learning",
            "NeurIPS",
            2022,
        ),
    ),
    "stablefdg": (
        Paper(
            "park2023stablefdg",
            "Park, Jungwuk and Han, Dong-Jun and Kim, Jinho and Wang, Shiqiang and Brinton, Christopher and Moon, Jaekyun",
            "{StableFDG}: Style and Attention Based Learning for Federated Domain Generalization",
            "NeurIPS",
            2023,
        ),
    ),
    "irm": (
        Paper(
            "arjovsky2019invariant",
            "Arjovsky, Martin and Bottou, Léon and Gulrajani, Ishaan and Lopez-Paz, David",
            "Invariant Risk Minimization",
            "arXiv:1907.02893",
            2019,
        ),
        _DOMAINBED,
    ),
    "vrex": (
        Paper(
            "krueger2021out",
            "Krueger, David and Caballero, Ethan and Jacobsen, Joern-Henrik and Zhang, Amy and Binas, Jonathan and "
            "Zhang, Dinghuai and Le Priol, Remi and Courville, Aaron",
            "Out-of-Distribution Generalization via Risk Extrapolation ({REx})",
            "ICML",
            2021,
        ),
        _DOMAINBED,
    ),
    "coral": (
        Paper(
            "sun2016deep",
            "Sun, Baochen and Saenko, Kate",
            "Deep {CORAL}: Correlation Alignment for Deep Domain Adaptation",
            "ECCV Workshops",
            2016,
        ),
        _DOMAINBED,
    ),
    "mmd": (
        Paper(
            "li2018domain",
            "Li, Haoliang and Pan, Sinno Jialin and Wang, Shiqi and Kot, Alex C.",
            "Domain Generalization with Adversarial Feature Learning",
            "CVPR",
            2018,
        ),
        _DOMAINBED,
    ),
    "fishr": (
        Paper(
            "rame2022fishr",
            "Rame, Alexandre and Dancette, Corentin and Cord, Matthieu",
            "{Fishr}: Invariant Gradient Variances for Out-of-Distribution Generalization",
            "ICML",
            2022,
        ),
    ),
    "fish": (
        Paper(
            "shi2022gradient",
            "Shi, Yuge and Seely, Jeffrey and Torr, Philip H. S. and Siddharth, N. and Hannun, Awni and Usunier, Nicolas and "
            "Synnaeve, Gabriel",
            "Gradient Matching for Domain Generalization",
            "ICLR",
            2022,
        ),
    ),
    "fact": (
        Paper(
            "schrod2023fact",
            "Schrod, Stefan and Lippl, Jonas and Schäfer, Andreas and Altenbuchinger, Michael",
            "{FACT}: Federated Adversarial Cross Training",
            "arXiv:2306.00607",
            2023,
        ),
    ),
    "kd3a": (
        Paper(
            "feng2021kd3a",
            "Feng, Haozhe and You, Zhaoyang and Chen, Minghao and Zhang, Tianye and Zhu, Minfeng and Wu, Fei and Wu, Chao and "
            "Chen, Wei",
            "{KD3A}: Unsupervised Multi-Source Decentralized Domain Adaptation via Knowledge Distillation",
            "ICML",
            2021,
        ),
    ),
    "mcd": (
        Paper(
            "saito2018maximum",
            "Saito, Kuniaki and Watanabe, Kohei and Ushiku, Yoshitaka and Harada, Tatsuya",
            "Maximum Classifier Discrepancy for Unsupervised Domain Adaptation",
            "CVPR",
            2018,
        ),
    ),
    "fedka": (
        Paper(
            "sun2022feature",
            "Sun, Yuwei and Chong, Ng and Ochiai, Hideya",
            "Feature Distribution Matching for Federated Domain Generalization",
            "ACML",
            2022,
        ),
    ),
    "fada": (
        Paper(
            "peng2020federated",
            "Peng, Xingchao and Huang, Zijun and Zhu, Yizhe and Saenko, Kate",
            "Federated Adversarial Domain Adaptation",
            "ICLR",
            2020,
        ),
    ),
    "m3sda": (
        Paper(
            "peng2019moment",
            "Peng, Xingchao and Bai, Qinxun and Xia, Xide and Huang, Zijun and Saenko, Kate and Wang, Bo",
            "Moment Matching for Multi-Source Domain Adaptation",
            "ICCV",
            2019,
        ),
    ),
}
"""By the name in configurations."""
