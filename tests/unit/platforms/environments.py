"""One realistic environment for each platform: what its operator sets, with the noise that comes along."""

from __future__ import annotations

POD = {"KUBERNETES_SERVICE_HOST": "10.192.0.1", "KUBERNETES_SERVICE_PORT": "443", "DSW_7_SERVICE_HOST": "10.192.3.4"}

DLC = {
    **POD,
    "HOSTNAME": "dlc18isgeayd1234-worker-0",
    "KUBERNETES_CONTAINER_RESOURCE_GPU": "8",
    "NPROC_PER_NODE": "8",
    "WORLD_SIZE": "2",
    "RANK": "1",
    "MASTER_ADDR": "dlc18isgeayd1234-master-0",
    "MASTER_PORT": "23456",
    "PYTHONUNBUFFERED": "0",
    "REGION_ID": "cn-hangzhou",
    "NCCL_SOCKET_IFNAME": "eth",
}
KUBEDL = {
    **POD,
    "HOSTNAME": "tune-worker-2",
    "PYTHONUNBUFFERED": "0",
    "WORLD_SIZE": "4",
    "RANK": "3",
    "MASTER_ADDR": "tune-master-0",
    "MASTER_PORT": "23456",
}
KUBEFLOW_V1 = {
    **POD,
    "HOSTNAME": "tune-worker-0",
    "PYTHONUNBUFFERED": "1",
    "PET_NNODES": "2",
    "PET_NODE_RANK": "1",
    "PET_NPROC_PER_NODE": "8",
    "PET_MASTER_ADDR": "tune-master-0",
    "PET_MASTER_PORT": "23456",
    "WORLD_SIZE": "16",  # processes
    "RANK": "1",
    "MASTER_ADDR": "tune-master-0",
    "MASTER_PORT": "23456",
}
KUBEFLOW_V1_ELASTIC = {
    **POD,
    "HOSTNAME": "tune-worker-2",
    "PYTHONUNBUFFERED": "0",
    "PET_RDZV_ENDPOINT": "tune-worker-0:23456",
    "PET_RDZV_BACKEND": "c10d",
    "PET_NNODES": "1:4",
    "PET_MAX_RESTARTS": "100",
}
TRAINER_V2 = {
    **POD,
    "HOSTNAME": "tune-node-0-1",
    "JOB_COMPLETION_INDEX": "1",
    "PET_NNODES": "3",
    "PET_NPROC_PER_NODE": "auto",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "tune-node-0-0.tune",
    "PET_MASTER_PORT": "29400",
}
JOBSET = {
    **POD,
    "HOSTNAME": "tune-workers-0-2",
    "JOB_COMPLETION_INDEX": "2",
    "MASTER_ADDR": "tune-workers-0-0.tune",
    "MASTER_PORT": "3389",
}
VOLCANO_PYTORCH = {
    **POD,
    "HOSTNAME": "tune-worker-1",
    "VC_TASK_INDEX": "1",
    "VK_TASK_INDEX": "1",
    "VC_MASTER_HOSTS": "tune-master-0.tune",
    "VC_MASTER_NUM": "1",
    "VC_WORKER_HOSTS": "tune-worker-0.tune,tune-worker-1.tune",
    "VC_WORKER_NUM": "2",
    "WORLD_SIZE": "3",
    "RANK": "2",
    "MASTER_ADDR": "tune-master-0.tune",
    "MASTER_PORT": "23456",
}
VOLCANO_PLAIN = {k: v for k, v in VOLCANO_PYTORCH.items() if k not in ("WORLD_SIZE", "RANK", "MASTER_ADDR")}
VOLCANO_ONE_TASK = {
    **POD,
    "HOSTNAME": "tune-trainer-1",
    "VC_TASK_INDEX": "1",
    "VC_TRAINER_HOSTS": "tune-trainer-0.tune,tune-trainer-1.tune",
    "VC_TRAINER_NUM": "2",
}
MPI_OPERATOR = {
    **POD,
    "HOSTNAME": "tune-launcher",
    "K_MPI_JOB_ROLE": "launcher",
    "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
    "OMPI_MCA_orte_default_hostfile": "/etc/mpi/hostfile",
    "OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10",
    "NVIDIA_VISIBLE_DEVICES": "",
    "NVIDIA_DRIVER_CAPABILITIES": "",
}
MPI_OPERATOR_FILE = "tune-worker-0.tune.default.svc slots=8\ntune-worker-1.tune.default.svc slots=8\n"
KUBEDL_MPI = {
    **POD,
    "HOSTNAME": "tune-launcher",
    "OMPI_MCA_plm_rsh_agent": "/etc/mpi/kubexec.sh",
    "OMPI_MCA_orte_default_hostfile": "/etc/mpi/hostfile",
}
KUBEDL_MPI_FILE = "tune-worker-0 slots=1\ntune-worker-1 slots=1\ntune-worker-2 slots=1\n"
SLURM = {
    "HOSTNAME": "gpu03",
    "SLURM_JOB_ID": "200505",
    "SLURM_NNODES": "4",
    "SLURM_JOB_NUM_NODES": "4",
    "SLURM_JOB_NODELIST": "gpu[01-03,07]",
    "SLURM_NODELIST": "gpu[01-03,07]",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gpu[01-03,07]",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "1(x4)",
    "SLURM_NODEID": "2",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_GPUS_ON_NODE": "8",
    "PMI_RANK": "2",  # srun --mpi=pmi2
    "PMI_SIZE": "4",
}
SLURM_BATCH_SCRIPT = {
    **{name: value for name, value in SLURM.items() if "_STEP_" not in name and not name.startswith("PMI")},
    "SLURM_NODEID": "0",
    "SLURM_PROCID": "0",
}
SAGEMAKER = {
    "HOSTNAME": "ip-10-0-1-2.ec2.internal",
    "TRAINING_JOB_ARN": "arn:aws:sagemaker:us-west-2:1:training-job/tune",
    "SM_HOSTS": '["algo-1","algo-2"]',
    "SM_CURRENT_HOST": "algo-2",
    "SM_NUM_GPUS": "8",
    "SM_NETWORK_INTERFACE_NAME": "eth0",
}
AZURE = {
    "AZUREML_RUN_ID": "tune_123",
    "AZUREML_EXPERIMENT_ID": "4f",
    "AZUREML_NODE_COUNT": "2",
    "AZ_BATCH_MASTER_NODE": "10.0.0.4:6000",
    "NODE_RANK": "1",
    "MASTER_ADDR": "10.0.0.4",
    "MASTER_PORT": "6105",
    "WORLD_SIZE": "2",
    "RANK": "1",
    "LOCAL_RANK": "0",
}
AZURE_MPI = {
    "AZUREML_EXPERIMENT_ID": "4f",
    "AZ_BATCH_MASTER_NODE": "10.0.0.4:6000",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
}
VOLCENGINE = {
    "MLP_TASK_ID": "t-20210924211641-nznsh",
    "MLP_ROLE": "WORKER",
    "MLP_ROLE_INDEX": "1",
    "MLP_WORKER_RACK_RANK_INDEX": "0",
    "MLP_WORKER_NUM": "2",
    "MLP_WORKER_GPU": "8",
    "MLP_WORKER_ALL_HOSTS": "10.128.97.74,10.128.96.17",
    "MLP_WORKER_0_HOST": "10.128.97.74",
    "MLP_WORKER_0_PORT": "2222",
    "MLP_HOST": "10.128.96.17",
}
RAY = {"RAY_JOB_ID": "01000000", "RAY_RAYLET_PID": "311", "RAY_ADDRESS": "10.0.0.1:6379"}
BY_HAND = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "NODE_RANK": "1", "HOSTNAME": "b"}
