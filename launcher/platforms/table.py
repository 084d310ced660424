"""The table of platforms: which variables say so, and which name the nodes, this node, its ranks and the master.

A new platform is one row. The traps: DLC, KubeDL and Volcano count *nodes* in WORLD_SIZE, Kubeflow's PyTorchJob v1 and
Azure ML count *processes* there; so WORLD_SIZE is never read before the platform is known. The order matters only where
two rows recognise the same place and agree on it: then the first names it.

docs/platforms.md is made of this table (scripts/gen_platform_docs.py).
"""

from __future__ import annotations

from launcher.platforms.readers import (
    MPI_HOSTFILE,
    read_azure,
    read_by_hand,
    read_indexed_job,
    read_kubeflow_v1,
    read_mpi,
    read_sagemaker,
    read_slurm,
    read_volcano,
    read_volcengine,
    refuse_ray,
)
from launcher.platforms.row import Certainty, Platform, Sign

PLATFORMS: tuple[Platform, ...] = (
    Platform(
        "PAI-DLC PyTorchJob",
        all_of=(Sign("HOSTNAME", r"(dlc|train)[0-9a-z]+-(master|worker)-\d+"), Sign("WORLD_SIZE")),
        any_of=(Sign("NPROC_PER_NODE"), Sign("KUBERNETES_CONTAINER_RESOURCE_GPU")),
        num_nodes=("WORLD_SIZE",),
        node_rank=("RANK",),
        master_addr=("MASTER_ADDR",),
        master_port=("MASTER_PORT",),
        num_ranks=("NPROC_PER_NODE", "KUBERNETES_CONTAINER_RESOURCE_GPU"),
        source="Alibaba Cloud, PAI: Built-in environment variables (2026-04); environment dumps in aliyun/pai-examples",
        certainty=Certainty.SOURCE,
        note="`WORLD_SIZE` counts nodes. The master's name may not resolve before its pod is up. Jobs without a master"
        " role have workers only; `RANK` numbers them from 0. The pattern of `HOSTNAME` is inferred from dumps.",
    ),
    Platform(
        "Kubeflow PyTorchJob v1",
        all_of=(Sign("PET_NNODES"),),
        any_of=(Sign("WORLD_SIZE"), Sign("PET_RDZV_ENDPOINT")),
        num_nodes=("PET_NNODES",),
        node_rank=("PET_NODE_RANK", "RANK"),
        num_ranks=("PET_NPROC_PER_NODE", "PET_N_PROC_PER_NODE"),
        master_addr=("PET_MASTER_ADDR", "MASTER_ADDR"),
        master_port=("PET_MASTER_PORT", "MASTER_PORT"),
        also=("HOSTNAME",),
        read=read_kubeflow_v1,
        source="kubeflow/training-operator, pkg/controller.v1/pytorch (envvar.go, elastic.go), release 1.9",
        certainty=Certainty.SOURCE,
        note="`WORLD_SIZE` counts processes and is not read. An elastic job has `PET_NNODES=MIN:MAX`; without a master"
        " it gets no rank, and the index in the pod's name (`-worker-2`) is taken.",
    ),
    Platform(
        "Kubeflow Trainer v2",
        all_of=(Sign("PET_NNODES"),),
        unless=("WORLD_SIZE", "PET_RDZV_ENDPOINT"),
        num_nodes=("PET_NNODES",),
        node_rank=("PET_NODE_RANK",),
        num_ranks=("PET_NPROC_PER_NODE",),
        master_addr=("PET_MASTER_ADDR",),
        master_port=("PET_MASTER_PORT",),
        source="kubeflow/trainer, pkg/runtime/framework/plugins/torch/torch.go (2026-08)",
        certainty=Certainty.SOURCE,
        note="`PET_NPROC_PER_NODE` may be `auto`, `cpu` or `gpu`: then the ranks are counted on the node.",
    ),
    Platform(
        "KubeDL PyTorchJob",
        all_of=(
            Sign("KUBERNETES_SERVICE_HOST"),
            Sign("PYTHONUNBUFFERED", "0"),
            Sign("WORLD_SIZE"),
            Sign("RANK"),
            Sign("MASTER_ADDR"),
        ),
        unless=("PET_NNODES",),
        num_nodes=("WORLD_SIZE",),
        node_rank=("RANK",),
        master_addr=("MASTER_ADDR",),
        master_port=("MASTER_PORT",),
        source="kubedl-io/kubedl, controllers/pytorch/pytorchjob_controller.go",
        certainty=Certainty.SOURCE,
        note="`WORLD_SIZE` counts nodes. Kubeflow's operator sets the same variables with the same meaning in releases"
        " that do not know `PET_NODE_RANK`. The master may see itself as `localhost`.",
    ),
    Platform(
        "Volcano job",
        any_of=(Sign("VC_TASK_INDEX"), Sign("VK_TASK_INDEX")),
        num_nodes=("WORLD_SIZE",),
        node_rank=("RANK",),
        master_addr=("MASTER_ADDR",),
        master_port=("MASTER_PORT",),
        also=("VC_MASTER_NUM", "VC_WORKER_NUM", "HOSTNAME"),
        read=read_volcano,
        source="volcano-sh/volcano, pkg/controllers/job/plugins (env, svc, distributed-framework/pytorch)",
        certainty=Certainty.SOURCE,
        note="With the pytorch plugin `WORLD_SIZE` counts nodes. Without it the hosts are those of `VC_<TASK>_HOSTS`"
        " (svc plugin), of one task, or of `master` and `worker` in this order.",
    ),
    Platform(
        "MPIJob",
        any_of=(
            Sign("K_MPI_JOB_ROLE"),
            Sign("OMPI_MCA_orte_default_hostfile", MPI_HOSTFILE),
            Sign("I_MPI_HYDRA_HOST_FILE", MPI_HOSTFILE),
            Sign("HYDRA_HOST_FILE", MPI_HOSTFILE),
        ),
        hosts=("OMPI_MCA_orte_default_hostfile", "I_MPI_HYDRA_HOST_FILE", "HYDRA_HOST_FILE"),
        also=("OMPI_MCA_plm_rsh_agent", "NVIDIA_VISIBLE_DEVICES", "HOSTNAME"),
        read=read_mpi,
        source="kubeflow/mpi-operator, pkg/controller/mpi_job_controller.go; kubedl-io/kubedl, MPIJob",
        certainty=Certainty.SOURCE,
        note=f"The hosts are those of `{MPI_HOSTFILE}`. The launcher pod is a node only where the file names it, and"
        " often has no GPU (`NVIDIA_VISIBLE_DEVICES` is empty). `slots=1` is the operators' default and counts"
        " nothing.",
    ),
    Platform(
        "Slurm",
        all_of=(Sign("SLURM_JOB_ID"),),
        any_of=(Sign("SLURM_NNODES"), Sign("SLURM_JOB_NUM_NODES"), Sign("SLURM_NODEID")),
        num_nodes=("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
        node_rank=("SLURM_NODEID",),
        num_ranks=("SLURM_GPUS_ON_NODE",),
        hosts=("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"),
        also=("SLURM_STEP_ID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_LOCALID", "SLURM_HET_SIZE"),
        read=read_slurm,
        source="SchedMD/slurm, doc/man/man1/srun.1, section OUTPUT ENVIRONMENT VARIABLES",
        certainty=Certainty.SOURCE,
        note="One task a node: `srun --ntasks-per-node=1 ftlaunch ...`. The node list is expanded here; only what is"
        " not understood is given to `scontrol show hostnames`. That node 0 is the first of the list, and"
        " `SLURM_GPUS_ON_NODE`, `SLURM_HET_SIZE`, are general knowledge.",
    ),
    Platform(
        "SageMaker",
        any_of=(Sign("SM_HOSTS"), Sign("TRAINING_JOB_ARN")),
        num_ranks=("SM_NUM_GPUS",),
        hosts=("SM_HOSTS",),
        also=("SM_CURRENT_HOST",),
        read=read_sagemaker,
        source="aws/sagemaker-training-toolkit, ENVIRONMENT_VARIABLES.md",
        certainty=Certainty.SOURCE,
        note="Nodes are the entries of `SM_HOSTS`, the index is that of `SM_CURRENT_HOST`. Without SageMaker's toolkit"
        " in the image the same is read from `/opt/ml/input/config/resourceconfig.json`; that `TRAINING_JOB_ARN` is set"
        " then is general knowledge.",
    ),
    Platform(
        "Azure ML",
        any_of=(Sign("AZUREML_RUN_ID"), Sign("AZUREML_EXPERIMENT_ID")),
        num_nodes=("AZUREML_NODE_COUNT",),
        node_rank=("NODE_RANK", "OMPI_COMM_WORLD_RANK"),
        master_addr=("MASTER_ADDR", "AZ_BATCH_MASTER_NODE", "AZ_BATCHAI_MPI_MASTER_NODE"),
        master_port=("MASTER_PORT",),
        also=(
            "WORLD_SIZE",
            "LOCAL_RANK",
            "OMPI_COMM_WORLD_SIZE",
            "OMPI_COMM_WORLD_LOCAL_SIZE",
            "OMPI_COMM_WORLD_LOCAL_RANK",
        ),
        read=read_azure,
        source="MicrosoftDocs/azure-ai-docs, how-to-train-distributed-gpu.md (`MASTER_*`, `NODE_RANK`, `WORLD_SIZE`);"
        " deepspeed/comm/comm.py (`AZ_BATCH_*`); public scripts (`AZUREML_NODE_COUNT`)",
        certainty=Certainty.USE,
        note="`process_count_per_instance: 1`, so that the command runs once on each node. `WORLD_SIZE` counts"
        " processes. `AZ_BATCH_MASTER_NODE` is `ADDRESS:PORT`.",
    ),
    Platform(
        "Volcengine ML Platform",
        all_of=(Sign("MLP_WORKER_NUM"), Sign("MLP_ROLE_INDEX")),
        num_nodes=("MLP_WORKER_NUM",),
        node_rank=("MLP_ROLE_INDEX",),
        num_ranks=("MLP_WORKER_GPU",),
        master_addr=("MLP_WORKER_0_HOST",),
        master_port=("MLP_WORKER_0_PORT",),
        hosts=("MLP_WORKER_ALL_HOSTS",),
        also=("MLP_ROLE",),
        read=read_volcengine,
        source="volcengine.com/docs/6459/75329",
        certainty=Certainty.SOURCE,
        note="Workers only. `MLP_WORKER_RACK_RANK_INDEX`, an order by switches, is not used.",
    ),
    Platform(
        "JobSet or Indexed Job",
        all_of=(Sign("JOB_COMPLETION_INDEX"),),
        unless=("PET_NNODES", "K_MPI_JOB_ROLE", "OMPI_MCA_orte_default_hostfile"),
        node_rank=("JOB_COMPLETION_INDEX",),
        master_addr=("MASTER_ADDR",),
        master_port=("MASTER_PORT",),
        also=("RANK",),
        read=read_indexed_job,
        source="kubernetes-sigs/jobset; Kubernetes documentation, Indexed Job",
        certainty=Certainty.SOURCE,
        note="The number of nodes is nowhere: write `cluster.nodes`, and set `MASTER_ADDR` in the pods' env"
        " (`JOBSET-JOB-0-0.JOBSET`). `cluster.nodes: 1` for a pod by itself.",
    ),
    Platform(
        "Ray",
        any_of=(Sign("RAY_JOB_ID"), Sign("RAY_RAYLET_PID"), Sign("KUBERAY_GEN_RAY_START_CMD")),
        read=refuse_ray,
        source="ray-project/ray (`RAY_JOB_ID`, `RAY_RAYLET_PID`); ray-project/kuberay (`KUBERAY_GEN_RAY_START_CMD`)",
        certainty=Certainty.SOURCE,
        note="Refused: Ray starts and places processes by itself. `RAY_ADDRESS` alone says nothing.",
    ),
)

# Looked at when nothing above is recognised and job.yaml gives `cluster.nodes`.
BY_HAND = Platform(
    "MASTER_ADDR and RANK",
    all_of=(Sign("MASTER_ADDR"),),
    any_of=(Sign("NODE_RANK"), Sign("RANK")),
    node_rank=("NODE_RANK", "RANK"),
    master_addr=("MASTER_ADDR",),
    master_port=("MASTER_PORT",),
    also=("WORLD_SIZE",),
    read=read_by_hand,
    source="torch.distributed, environment variable initialization",
    certainty=Certainty.SOURCE,
    note="Any other platform: set these in each node's environment, and `cluster.nodes` in job.yaml. `WORLD_SIZE` may"
    " stay if it is the number of nodes.",
)
