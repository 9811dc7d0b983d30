"""The papers of every algorithm, and BibTeX of them."""

from __future__ import annotations

from collections.abc import Mapping

from fedfleet.algorithms.bibtex import Paper
from fedfleet.algorithms.papers_of_domains import OF_DOMAINS

_REDDI = Paper(
    "reddi2021adaptive",
    "Reddi, Sashank J. and Charles, Zachary and Zaheer, Manzil and Garrett, Zachary and Rush, Keith and "
    "Konečný, Jakub and Kumar, Sanjiv and McMahan, H. Brendan",
    "Adaptive Federated Optimization",
    "ICLR",
    2021,
)
_MCMAHAN = Paper(
    "mcmahan2017communication",
    "McMahan, Brendan and Moore, Eider and Ramage, Daniel and Hampson, Seth and Agüera y Arcas, Blaise",
    "Communication-Efficient Learning of Deep Networks from Decentralized Data",
    "AISTATS",
    2017,
)
_FEDVARP = Paper(
    "jhunjhunwala2022fedvarp",
    "Jhunjhunwala, Divyansh and Sharma, Pranay and Nagarkatti, Aushim and Joshi, Gauri",
    "{FedVARP}: Tackling the Variance due to Partial Client Participation in Federated Learning",
    "UAI",
    2022,
)
_KARIMIREDDY = Paper(
    "karimireddy2020scaffold",
    "Karimireddy, Sai Praneeth and Kale, Satyen and Mohri, Mehryar and Reddi, Sashank J. and Stich, Sebastian U. and "
    "Suresh, Ananda Theertha",
    "{SCAFFOLD}: Stochastic Controlled Averaging for Federated Learning",
    "ICML",
    2020,
)
_MIME = Paper(
    "karimireddy2021breaking",
    "Karimireddy, Sai Praneeth and Jaggi, Martin and Kale, Satyen and Mohri, Mehryar and Reddi, Sashank J. and "
    "Stich, Sebastian U. and Suresh, Ananda Theertha",
    "Breaking the Centralized Barrier for Cross-Device Federated Learning",
    "NeurIPS",
    2021,
)
_LOCAL_SGDA = Paper(
    "deng2021local",
    "Deng, Yuyang and Mahdavi, Mehrdad",
    "Local Stochastic Gradient Descent Ascent: Convergence Analysis and Communication Efficiency",
    "AISTATS",
    2021,
)
_CODA = Paper(
    "yuan2021federated",
    "Yuan, Zhuoning and Guo, Zhishuai and Xu, Yi and Ying, Yiming and Yang, Tianbao",
    "Federated Deep {AUC} Maximization for Heterogeneous Data with a Constant Communication Complexity",
    "ICML",
    2021,
)
_CDMA = Paper(
    "xie2023cdma",
    "Xie, Jiahao and Zhang, Chao and Shen, Zebang and Liu, Weijie and Qian, Hui",
    "{CDMA}: A Practical Cross-Device Federated Learning Algorithm for General Minimax Problems",
    "AAAI",
    2023,
)
_FEDMM = Paper(
    "shen2023fedmm",
    "Shen, Yan and Du, Jian and Zhao, Han and Ji, Zhanghexuan and Ma, Chunwei and Gao, Mingchen",
    "{FedMM}: A Communication Efficient Solver for Federated Adversarial Domain Adaptation",
    "AAMAS",
    2023,
)
_ROBUST_RULES = (
    Paper(
        "blanchard2017machine",
        "Blanchard, Peva and El Mhamdi, El Mahdi and Guerraoui, Rachid and Stainer, Julien",
        "Machine Learning with Adversaries: {Byzantine} Tolerant Gradient Descent",
        "NIPS",
        2017,
    ),
    Paper(
        "yin2018byzantine",
        "Yin, Dong and Chen, Yudong and Ramchandran, Kannan and Bartlett, Peter",
        "{Byzantine}-Robust Distributed Learning: Towards Optimal Statistical Rates",
        "ICML",
        2018,
    ),
    Paper(
        "pillutla2022robust",
        "Pillutla, Krishna and Kakade, Sham M. and Harchaoui, Zaid",
        "Robust Aggregation for Federated Learning",
        "IEEE Transactions on Signal Processing",
        2022,
    ),
    Paper(
        "sun2019can",
        "Sun, Ziteng and Kairouz, Peter and Suresh, Ananda Theertha and McMahan, H. Brendan",
        "Can You Really Backdoor Federated Learning?",
        "arXiv:1911.07963",
        2019,
    ),
    Paper(
        "fung2020limitations",
        "Fung, Clement and Yoon, Chris J. M. and Beschastnikh, Ivan",
        "The Limitations of Federated Learning in {Sybil} Settings",
        "RAID",
        2020,
    ),
    Paper(
        "cao2021fltrust",
        "Cao, Xiaoyu and Fang, Minghong and Liu, Jia and Gong, Neil Zhenqiang",
        "{FLTrust}: {Byzantine}-robust Federated Learning via Trust Bootstrapping",
        "NDSS",
        2021,
    ),
    Paper(
        "karimireddy2022byzantine",
        "Karimireddy, Sai Praneeth and He, Lie and Jaggi, Martin",
        "{Byzantine}-Robust Learning on Heterogeneous Datasets via Bucketing",
        "ICLR",
        2022,
    ),
)

HSU = Paper(
    "hsu2019measuring",
    "Hsu, Tzu-Ming Harry and Qi, Hang and Brown, Matthew",
    "Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification",
    "arXiv:1909.06335",
    2019,
)
"""Momentum at the server, FedAvgM."""

PAPERS: Mapping[str, tuple[Paper, ...]] = {
    "fedavg": (_MCMAHAN,),
    "fedopt": (
        _REDDI,
        HSU,
    ),
    "fedbuff": (
        Paper(
            "nguyen2022federated",
            "Nguyen, John and Malik, Kshitiz and Zhan, Hongyuan and Yousefpour, Ashkan and Rabbat, Mike and "
            "Malek, Mani and Huba, Dzmitry",
            "Federated Learning with Buffered Asynchronous Aggregation",
            "AISTATS",
            2022,
        ),
    ),
    "fedfix": (
        Paper(
            "fraboni2023general",
            "Fraboni, Yann and Vidal, Richard and Kameni, Laetitia and Lorenzi, Marco",
            "A General Theory for Federated Optimization with Asynchronous and Heterogeneous Clients Updates",
            "Journal of Machine Learning Research",
            2023,
        ),
    ),
    "refl": (
        Paper(
            "abdelmoniem2023refl",
            "Abdelmoniem, Ahmed M. and Sahu, Atal Narayan and Canini, Marco and Fahmy, Suhaib A.",
            "{REFL}: Resource-Efficient Federated Learning",
            "EuroSys",
            2023,
        ),
    ),
    "fedprox": (
        Paper(
            "li2020federated",
            "Li, Tian and Sahu, Anit Kumar and Zaheer, Manzil and Sanjabi, Maziar and Talwalkar, Ameet and Smith, Virginia",
            "Federated Optimization in Heterogeneous Networks",
            "MLSys",
            2020,
        ),
    ),
    "scaffold": (_KARIMIREDDY,),
    "fednova": (
        Paper(
            "wang2020tackling",
            "Wang, Jianyu and Liu, Qinghua and Liang, Hao and Joshi, Gauri and Poor, H. Vincent",
            "Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization",
            "NeurIPS",
            2020,
        ),
    ),
    "feddyn": (
        Paper(
            "acar2021federated",
            "Acar, Durmus Alp Emre and Zhao, Yue and Matas Navarro, Ramon and Mattina, Matthew and "
            "Whatmough, Paul N. and Saligrama, Venkatesh",
            "Federated Learning Based on Dynamic Regularization",
            "ICLR",
            2021,
        ),
    ),
    "fedawe": (
        Paper(
            "xiang2024efficient",
            "Xiang, Ming and Ioannidis, Stratis and Yeh, Edmund and Joe-Wong, Carlee and Su, Lili",
            "Efficient Federated Learning against Heterogeneous and Non-stationary Client Unavailability",
            "NeurIPS",
            2024,
        ),
    ),
    "clustered_sampling": (
        Paper(
            "fraboni2021clustered",
            "Fraboni, Yann and Vidal, Richard and Kameni, Laetitia and Lorenzi, Marco",
            "Clustered Sampling: Low-Variance and Improved Representativity for Clients Selection in Federated Learning",
            "ICML",
            2021,
        ),
        Paper(
            "li2020convergence",
            "Li, Xiang and Huang, Kaixuan and Yang, Wenhao and Wang, Shusen and Zhang, Zhihua",
            "On the Convergence of {FedAvg} on Non-{IID} Data",
            "ICLR",
            2020,
        ),
    ),
    "f3ast": (
        Paper(
            "ribero2022federated",
            "Ribero, Mónica and Vikalo, Haris and de Veciana, Gustavo",
            "Federated Learning Under Intermittent Client Availability and Time-Varying Communication Constraints",
            "IEEE Journal of Selected Topics in Signal Processing",
            2022,
        ),
    ),
    "fedlaavg": (
        Paper(
            "yan2020distributed",
            "Yan, Yikai and Niu, Chaoyue and Ding, Yucheng and Zheng, Zhenzhe and Wu, Fan and Chen, Guihai and "
            "Tang, Shaojie and Wu, Zhihua",
            "Distributed Non-Convex Optimization with Sublinear Speedup under Intermittent Client Availability",
            "arXiv:2002.07399",
            2020,
        ),
    ),
    "cluster_fedvarp": (_FEDVARP,),
    "amplified_fedavg": (
        Paper(
            "wang2022unified",
            "Wang, Shiqiang and Ji, Mingyue",
            "A Unified Analysis of Federated Learning with Arbitrary Client Participation",
            "NeurIPS",
            2022,
        ),
    ),
    "amplified_scaffold": (
        Paper(
            "crawshaw2024federated",
            "Crawshaw, Michael and Liu, Mingrui",
            "Federated Learning under Periodic Client Participation and Heterogeneity: A New Communication-Efficient "
            "Algorithm and Analysis",
            "NeurIPS",
            2024,
        ),
    ),
    "mime": (_MIME,),
    "mimelite": (_MIME,),
    "fedasync": (
        Paper(
            "xie2019asynchronous",
            "Xie, Cong and Koyejo, Sanmi and Gupta, Indranil",
            "Asynchronous Federated Optimization",
            "arXiv:1903.03934",
            2019,
        ),
    ),
    "afl": (
        Paper(
            "mohri2019agnostic",
            "Mohri, Mehryar and Sivek, Gary and Suresh, Ananda Theertha",
            "Agnostic Federated Learning",
            "ICML",
            2019,
        ),
    ),
    "drfa": (
        Paper(
            "deng2020distributionally",
            "Deng, Yuyang and Kamani, Mohammad Mahdi and Mahdavi, Mehrdad",
            "Distributionally Robust Federated Averaging",
            "NeurIPS",
            2020,
        ),
    ),
    "qffl": (
        Paper(
            "li2020fair",
            "Li, Tian and Sanjabi, Maziar and Beirami, Ahmad and Smith, Virginia",
            "Fair Resource Allocation in Federated Learning",
            "ICLR",
            2020,
        ),
    ),
    "fedper": (
        Paper(
            "arivazhagan2019federated",
            "Arivazhagan, Manoj Ghuhan and Aggarwal, Vinay and Singh, Aaditya Kumar and Choudhary, Sunav",
            "Federated Learning with Personalization Layers",
            "arXiv:1912.00818",
            2019,
        ),
    ),
    "lg_fedavg": (
        Paper(
            "liang2020think",
            "Liang, Paul Pu and Liu, Terrance and Ziyin, Liu and Allen, Nicholas B. and Auerbach, Randy P. and "
            "Brent, David and Salakhutdinov, Ruslan and Morency, Louis-Philippe",
            "Think Locally, Act Globally: Federated Learning with Local and Global Representations",
            "arXiv:2001.01523",
            2020,
        ),
    ),
    "fedbn": (
        Paper(
            "li2021fedbn",
            "Li, Xiaoxiao and Jiang, Meirui and Zhang, Xiaofei and Kamp, Michael and Dou, Qi",
            "{FedBN}: Federated Learning on Non-{IID} Features via Local Batch Normalization",
            "ICLR",
            2021,
        ),
    ),
    "fedrep": (
        Paper(
            "collins2021exploiting",
            "Collins, Liam and Hassani, Hamed and Mokhtari, Aryan and Shakkottai, Sanjay",
            "Exploiting Shared Representations for Personalized Federated Learning",
            "ICML",
            2021,
        ),
    ),
    "fedbabu": (
        Paper(
            "oh2022fedbabu",
            "Oh, Jaehoon and Kim, Sangmook and Yun, Se-Young",
            "{FedBABU}: Toward Enhanced Representation for Federated Image Classification",
            "ICLR",
            2022,
        ),
    ),
    "fedrod": (
        Paper(
            "chen2022bridging",
            "Chen, Hong-You and Chao, Wei-Lun",
            "On Bridging Generic and Personalized Federated Learning for Image Classification",
            "ICLR",
            2022,
        ),
    ),
    "fedpac": (
        Paper(
            "xu2023personalized",
            "Xu, Jian and Tong, Xinyi and Huang, Shao-Lun",
            "Personalized Federated Learning with Feature Alignment and Classifier Collaboration",
            "ICLR",
            2023,
        ),
    ),
    "fedas": (
        Paper(
            "yang2024fedas",
            "Yang, Xiyuan and Huang, Wenke and Ye, Mang",
            "{FedAS}: Bridging Inconsistency in Personalized Federated Learning",
            "CVPR",
            2024,
        ),
    ),
    "ditto": (
        Paper(
            "li2021ditto",
            "Li, Tian and Hu, Shengyuan and Beirami, Ahmad and Smith, Virginia",
            "Ditto: Fair and Robust Federated Learning Through Personalization",
            "ICML",
            2021,
        ),
    ),
    "peravg": (
        Paper(
            "fallah2020personalized",
            "Fallah, Alireza and Mokhtari, Aryan and Ozdaglar, Asuman",
            "Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic Meta-Learning Approach",
            "NeurIPS",
            2020,
        ),
    ),
    "robust": _ROBUST_RULES,
    "parallel_sgda": (_CDMA,),
    "local_sgda": (_LOCAL_SGDA,),
    "local_sgda_plus": (_LOCAL_SGDA,),
    "extra_step": (
        Paper(
            "beznosikov2020distributed",
            "Beznosikov, Aleksandr and Samokhin, Valentin and Gasnikov, Alexander",
            "Distributed Saddle-Point Problems: Lower Bounds, Optimal Algorithms and Federated {GANs}",
            "arXiv:2010.13112",
            2020,
        ),
    ),
    "catalyst_scaffold_s": (
        Paper(
            "hou2021efficient",
            "Hou, Charlie and Thekumparampil, Kiran Koshy and Fanti, Giulia and Oh, Sewoong",
            "Efficient Algorithms for Federated Saddle Point Optimization",
            "arXiv:2102.06333",
            2021,
        ),
    ),
    "coda_plus": (_CODA,),
    "codasca": (_CODA,),
    "cdma_nc": (_CDMA,),
    "cdma_one": (_CDMA,),
    "cdma_ada": (_CDMA,),
    "fedmm": (_FEDMM,),
    "fedsgda": (_FEDMM,),
    "fedavg_sgda": (_FEDMM, _LOCAL_SGDA),
    "fedprox_sgda": (_FEDMM,),
    "fedrobust": (
        Paper(
            "reisizadeh2020robust",
            "Reisizadeh, Amirhossein and Farnia, Farzan and Pedarsani, Ramtin and Jadbabaie, Ali",
            "Robust Federated Learning: The Case of Affine Distribution Shifts",
            "NeurIPS",
            2020,
        ),
    ),
    "gt_gda": (
        Paper(
            "tsaknakis2020decentralized",
            "Tsaknakis, Ioannis and Hong, Mingyi and Liu, Sijia",
            "Decentralized Min-Max Optimization: Formulations, Algorithms and Applications in Network Poisoning Attack",
            "ICASSP",
            2020,
        ),
    ),
    "gt_hsgd": (
        Paper(
            "xin2021hybrid",
            "Xin, Ran and Khan, Usman and Kar, Soummya",
            "A Hybrid Variance-Reduced Method for Decentralized Stochastic Non-Convex Optimization",
            "ICML",
            2021,
        ),
    ),
    **OF_DOMAINS,
}
"""By the name in configurations."""
SERVER_OPTIMIZERS: Mapping[str, tuple[Paper, ...]] = dict.fromkeys(("adam", "yogi", "adagrad"), (_REDDI,))
CORRECTIONS: Mapping[str, tuple[Paper, ...]] = {
    "known_p": (
        Paper(
            "horvitz1952generalization",
            "Horvitz, Daniel G. and Thompson, Donovan J.",
            "A Generalization of Sampling Without Replacement From a Finite Universe",
            "Journal of the American Statistical Association",
            1952,
        ),
    ),
    "fedau": (
        Paper(
            "wang2024lightweight",
            "Wang, Shiqiang and Ji, Mingyue",
            "A Lightweight Method for Tackling Unknown Participation Statistics in Federated Averaging",
            "ICLR",
            2024,
        ),
    ),
    "mifa": (
        Paper(
            "gu2021fast",
            "Gu, Xinran and Huang, Kaixuan and Zhang, Jingzhao and Huang, Longbo",
            "Fast Federated Learning in the Presence of Arbitrary Device Unavailability",
            "NeurIPS",
            2021,
        ),
    ),
    "fedvarp": (_FEDVARP,),
}
"""The papers of the corrections for clients that drop out, by ``algorithm.correction``."""
