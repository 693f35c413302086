// A stub of NVML, for driver.cpp: build it as libnvidia-ml.so.1, on the path of libraries.
extern "C" {
int nvmlInit_v2() { return 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char*, void** d) { *d = (void*)1; return 0; }
int nvmlDeviceGetGpuFabricInfoV(void*, void*) { return 0; }
}
extern "C" {
int nvmlDeviceGetComputeRunningProcesses(void*, unsigned* n, void*) { *n = 0; return 0; }
int nvmlDeviceGetNvLinkRemoteDeviceType(...) { return 3; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(...) { return 3; }
int nvmlSystemGetCudaDriverVersion_v2(int* v) { *v = 13000; return 0; }
}
