// A stub of CUDA's runtime, for driver.cpp: memory is rising addresses without memory, and streams are busy as the
// driver says. Build it as libcudart.so.13 with the symbol version of that name, and a trap for every other function of
// the runtime that libc10_cuda.so imports (nm -D tells which).
#include <cstdint>
#include <cstring>
#include <cuda_runtime_api.h>
#include <map>
extern "C" {
size_t stub_limit = size_t{1} << 34, stub_used = 0;
static char* next_address = reinterpret_cast<char*>(0x7f0000000000ULL);
static std::map<void*, size_t> live;
static std::map<cudaStream_t, int> busy; // epoch in which it was made busy
int stub_epoch = 0;
struct Ev {
  cudaStream_t s;
  int until;
};
cudaError_t cudaMalloc(void** p, size_t n) {
  if (n > stub_limit - (stub_used > stub_limit ? stub_limit : stub_used))
    return cudaErrorMemoryAllocation;
  *p = next_address;
  live[*p] = n;
  stub_used += n;
  next_address += (n + (1 << 21) - 1) / (1 << 21) * (1 << 21) + (1 << 21);
  return cudaSuccess;
}
cudaError_t cudaFree(void* p) {
  if (!p)
    return cudaSuccess;
  stub_used -= live.at(p);
  live.erase(p);
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t* f, size_t* t) {
  *t = stub_limit;
  *f = stub_limit - stub_used;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int* n) {
  *n = 1;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* d) {
  *d = 0;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int) {
  return cudaSuccess;
}
cudaError_t cudaGetLastError() {
  return cudaSuccess;
}
const char* cudaGetErrorString(cudaError_t) {
  return "stub";
}
const char* cudaGetErrorName(cudaError_t) {
  return "stub";
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* e, unsigned) {
  *e = reinterpret_cast<cudaEvent_t>(new Ev{});
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t e) {
  delete reinterpret_cast<Ev*>(e);
  return cudaSuccess;
}
void stub_make_busy(cudaStream_t s) {
  busy[s] = stub_epoch + 1;
}
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) {
  auto* v = reinterpret_cast<Ev*>(e);
  v->s = s;
  v->until = busy.count(s) ? busy[s] : 0;
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t e) {
  return reinterpret_cast<Ev*>(e)->until <= stub_epoch ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaEventSynchronize(cudaEvent_t) {
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* s) {
  *s = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* a, int* b) {
  *a = 0;
  *b = 0;
  return cudaSuccess;
}
static uintptr_t streams = 0x1000;
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* s, unsigned, int) {
  *s = reinterpret_cast<cudaStream_t>(streams += 16);
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int) {
  memset(p, 0, sizeof *p);
  p->totalGlobalMem = stub_limit;
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) {
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* v) {
  *v = 13000;
  return cudaSuccess;
}
}
// --- the driver: memory that is mapped into reserved addresses ---
#include <cuda.h>
#include <cstdio>
#include <cstdlib>
#include <string_view>
extern "C" {
static std::map<unsigned long long, size_t> handles;
static unsigned long long next_handle = 1;
static CUresult reserve(CUdeviceptr* p, size_t n, size_t, CUdeviceptr, unsigned long long) {
  *p = reinterpret_cast<CUdeviceptr>(next_address);
  live[next_address] = n;
  next_address += (n + (1 << 21) - 1) / (1 << 21) * (1 << 21) + (1 << 21);
  return CUDA_SUCCESS;
}
static CUresult unreserve(CUdeviceptr p, size_t) {
  live.erase(reinterpret_cast<void*>(p));
  return CUDA_SUCCESS;
}
static CUresult create(CUmemGenericAllocationHandle* h, size_t n, const CUmemAllocationProp*, unsigned long long) {
  if (n > stub_limit - (stub_used > stub_limit ? stub_limit : stub_used))
    return CUDA_ERROR_OUT_OF_MEMORY;
  *h = next_handle++;
  handles[*h] = n;
  stub_used += n;
  return CUDA_SUCCESS;
}
static CUresult release(CUmemGenericAllocationHandle h) {
  stub_used -= handles.at(h);
  handles.erase(h);
  return CUDA_SUCCESS;
}
static CUresult attribute(int* v, CUdevice_attribute, CUdevice) { *v = 0; return CUDA_SUCCESS; }
static CUresult map_memory(CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long) { return CUDA_SUCCESS; }
static CUresult unmap_memory(CUdeviceptr, size_t) { return CUDA_SUCCESS; }
static CUresult set_access(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t) { return CUDA_SUCCESS; }
}
#include <string>
#include <vector>
#include <array>
#include <utility>
static std::vector<std::string> names;
template <size_t N> CUresult trap_n() { fprintf(stderr, "TRAP %s\n", names.at(N).c_str()); abort(); }
template <size_t... N> static auto table(std::index_sequence<N...>) { return std::array<void*, sizeof...(N)>{(void*)&trap_n<N>...}; }
static void* trap_for(std::string_view n) { static auto t = table(std::make_index_sequence<64>()); names.emplace_back(n); return t.at(names.size()-1); }
extern "C" {
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** f, unsigned, unsigned long long, cudaDriverEntryPointQueryResult* r) {
  const std::string_view n(name);
  *f = n == "cuMemAddressReserve" ? (void*)&reserve : n == "cuMemAddressFree" ? (void*)&unreserve :
       n == "cuMemCreate" ? (void*)&create : n == "cuMemRelease" ? (void*)&release : n == "cuMemMap" ? (void*)&map_memory :
       n == "cuDeviceGetAttribute" ? (void*)&attribute : n == "cuMemUnmap" ? (void*)&unmap_memory : n == "cuMemSetAccess" ? (void*)&set_access : trap_for(n);
  if (r) *r = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
}
extern "C" bool stub_find(const void* p, const char** base) {
  auto it = live.upper_bound(const_cast<void*>(p));
  if (it == live.begin())
    return false;
  *base = static_cast<const char*>(std::prev(it)->first);
  return true;
}
