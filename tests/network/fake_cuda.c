/* A stand-in for CUDA's driver (libcuda.so.1) and NVML in processes without GPUs, with the functions called by UCX's
   cuda_copy and gpu_heap.c. It has one GPU, whose memory is process memory. Only these functions can access that memory
   by its GPU address.

   cc -shared -fPIC -Wl,-soname,libcuda.so.1 -o libcuda.so.1 fake_cuda.c
   cc -shared -fPIC -Wl,-soname,libnvidia-ml.so.1 -o libnvidia-ml.so.1 fake_cuda.c */
#define _GNU_SOURCE
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>

enum { OK = 0, INVALID = 1, DEVICE = 2, NOT_SUPPORTED = 801 };
enum { POINTER_CONTEXT = 1, MEMORY_TYPE = 2, IS_MANAGED = 8, ORDINAL = 9 };

static char *memory, *on_gpu;
static uint64_t size, copies;
static int thing; /* target of all handles */

/* Make shared memory of this process the GPU's memory; return its GPU address */
void *fake_gpu_memory(void *shared, uint64_t bytes) {
  on_gpu = mremap(shared, 0, bytes, MREMAP_MAYMOVE); /* a second mapping of the same pages */
  if (on_gpu == MAP_FAILED || mprotect(on_gpu, bytes, PROT_NONE)) return NULL;
  memory = shared, size = bytes;
  return on_gpu;
}
uint64_t fake_copies(void) { return copies; }

static int has(uint64_t address) { return on_gpu && address - (uint64_t)on_gpu < size; }
static void *reached(uint64_t address) { return has(address) ? memory + (address - (uint64_t)on_gpu) : (void *)address; }

int cuMemcpyAsync(uint64_t to, uint64_t from, size_t bytes, void *stream) {
  (void)stream;
  memcpy(reached(to), reached(from), bytes);
  __atomic_add_fetch(&copies, 1, __ATOMIC_SEQ_CST);
  return OK;
}
int cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t bytes, void *stream) {
  return cuMemcpyAsync((uint64_t)to, from, bytes, stream);
}
int cuStreamWriteValue64_v2(void *stream, uint64_t address, uint64_t value, unsigned flags) {
  (void)stream, (void)flags;
  if (!has(address) || address % 8) return INVALID;
  __atomic_store_n((uint64_t *)reached(address), value, __ATOMIC_SEQ_CST);
  return OK;
}

int cuPointerGetAttribute(void *to, int attribute, uint64_t address) {
  if (!has(address)) return INVALID;
  if (attribute == POINTER_CONTEXT) *(void **)to = &thing;
  else *(int *)to = attribute == MEMORY_TYPE ? DEVICE : 0;
  return OK;
}
int cuPointerGetAttributes(unsigned many, const int *attributes, void **to, uint64_t address) {
  for (unsigned i = 0; i < many; i++) {
    if (has(address)) cuPointerGetAttribute(to[i], attributes[i], address);
    else memset(to[i], 0, attributes[i] == POINTER_CONTEXT ? sizeof(void *) : attributes[i] == IS_MANAGED ? 1 : sizeof(int));
  }
  return OK;
}
int cuMemGetAddressRange_v2(uint64_t *base, size_t *bytes, uint64_t address) {
  if (!has(address)) return INVALID;
  *base = (uint64_t)on_gpu, *bytes = size;
  return OK;
}

/* One device, and one context, always current */
static int number(int *to, int value) {
  *to = value;
  return OK;
}
static int object(void **to) {
  *to = &thing;
  return OK;
}
int cuInit(unsigned flags) { return flags; }
int cuDeviceGetCount(int *to) { return number(to, 1); }
int cuDeviceGet(int *to, int device) { return number(to, device); }
int cuCtxGetDevice(int *to) { return number(to, 0); }
int cuDeviceGetAttribute(int *to, int attribute, int device) { return (void)attribute, number(to, device); }
int cuDeviceGetName(char *to, int bytes, int device) { return (void)device, strncpy(to, "none", bytes), OK; }
int cuDeviceGetUuid_v2(void *to, int device) { return memset(to, device, 16), OK; }
int cuDeviceTotalMem_v2(size_t *to, int device) { return (void)device, *to = 1ull << 40, OK; }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
  return (void)device, *flags = 0, number(active, 1);
}
int cuDevicePrimaryCtxRetain(void **to, int device) { return (void)device, object(to); }
int cuDevicePrimaryCtxRelease_v2(int device) { return device; }
int cuCtxGetCurrent(void **to) { return object(to); }
int cuCtxPushCurrent_v2(void *context) { return context != &thing; }
int cuCtxPopCurrent_v2(void **to) { return to ? object(to) : OK; }
int cuCtxGetId(void *context, unsigned long long *to) { return (void)context, *to = 1, OK; }
int cuCtxGetStreamPriorityRange(int *lowest, int *highest) { return number(lowest, 0), number(highest, -1); }
int cuStreamCreate(void **to, unsigned flags) { return (void)flags, object(to); }
int cuStreamCreateWithPriority(void **to, unsigned flags, int priority) { return (void)flags, (void)priority, object(to); }
int cuStreamSynchronize(void *stream) { return stream != &thing; }
int cuStreamDestroy_v2(void *stream) { return stream != &thing; }
int cuEventCreate(void **to, unsigned flags) { return (void)flags, object(to); }
int cuEventRecord(void *event, void *stream) { return event != stream; }
int cuEventQuery(void *event) { return event != &thing; }
int cuEventDestroy_v2(void *event) { return event != &thing; }
int cuGetErrorString(int error, const char **to) { return (void)error, *to = "an error of the fake driver", OK; }
int cuMemHostRegister_v2(void *address, size_t bytes, unsigned flags) { return (void)address, (void)bytes, (void)flags, OK; }
int cuMemHostUnregister(void *address) { return (void)address, OK; }
int cuPointerSetAttribute(const void *value, int attribute, uint64_t address) {
  return (void)value, (void)attribute, has(address) ? OK : INVALID;
}
int cuMemRetainAllocationHandle(void *to, void *address) { return (void)to, (void)address, INVALID; }
int cuGetProcAddress_v2(const char *name, void **to, int version, uint64_t flags, int *found) {
  return (void)name, (void)version, (void)flags, *to = NULL, number(found, 1);
}

/* UCX's module needs these symbols to load, and does not call them here */
#define LACKS(name) int name(void) { return NOT_SUPPORTED; }
LACKS(cuIpcCloseMemHandle)
LACKS(cuIpcGetMemHandle)
LACKS(cuIpcOpenMemHandle_v2)
LACKS(cuMemAddressFree)
LACKS(cuMemAddressReserve)
LACKS(cuMemAllocManaged)
LACKS(cuMemAlloc_v2)
LACKS(cuMemCreate)
LACKS(cuMemExportToShareableHandle)
LACKS(cuMemFree_v2)
LACKS(cuMemGetAllocationGranularity)
LACKS(cuMemGetAllocationPropertiesFromHandle)
LACKS(cuMemImportFromShareableHandle)
LACKS(cuMemMap)
LACKS(cuMemPoolDestroy)
LACKS(cuMemPoolExportPointer)
LACKS(cuMemPoolExportToShareableHandle)
LACKS(cuMemPoolImportFromShareableHandle)
LACKS(cuMemPoolImportPointer)
LACKS(cuMemPoolSetAccess)
LACKS(cuMemRangeGetAttribute)
LACKS(cuMemRelease)
LACKS(cuMemSetAccess)
LACKS(cuMemUnmap)
LACKS(cuMemcpyDtoDAsync_v2)
LACKS(cuMemcpyHtoD_v2)
LACKS(cuStreamAddCallback)
LACKS(nvmlErrorString)
