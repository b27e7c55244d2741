/* A symmetric heap in GPU memory without GDRCopy: a library preloaded together with hostile.c.

   cc -O1 -shared -fPIC -o libgpu_heap.so gpu_heap.c -ldl -lpthread

   A signal is an active message, which NVSHMEM's UCX transport applies by a load and a store of the CPU through GDRCopy's
   mapping of the heap. This library intercepts the message: the CUDA driver writes the word, on a separate stream that
   runs concurrently with waiting kernels, and the sender gets the answer that it counts. UCX's cuda_copy copies data and
   returns when the copy is complete, so the data arrives before its signal. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The active message by which NVSHMEM's transport sends an atomic operation */
struct message {
  void *ep;
  uint64_t bytes, value, compare, return_flag;
  uint64_t address, return_address;
  int operation;
  _Alignas(8) char is_proxys;
};
enum { SEND = 0, ANSWER = 1, SET = 3, ADD = 4, SIGNAL = 8, SIGNAL_SET = 9, SIGNAL_ADD = 10 };

/* UCX's structures (ucp.h) */
struct received {
  uint64_t has;
  void *reply_ep;
};
struct handler {
  uint64_t mask;
  unsigned id;
  uint32_t flags;
  int (*came)(void *, const void *, size_t, void *, size_t, const struct received *);
  void *argument;
};
struct send_param {
  uint32_t mask, flags;
  void *request;
  void (*sent)(void *request, int status, void *user_data);
  uint64_t rest[8];
};
enum { HAS_CALLBACK = 2, HAS_REPLY_EP = 1 };

/* CUDA's constants and functions (cuda.h) */
enum { DEVICE_ORDINAL = 9, NON_BLOCKING = 1, DEVICES = 64 };
typedef void *handle;
static int (*pointer_attribute)(void *, int, uint64_t), (*retain)(handle *, int), (*push)(handle), (*pop)(handle *),
    (*create_stream)(handle *, unsigned, int), (*write64)(handle, uint64_t, uint64_t, unsigned),
    (*read)(void *, uint64_t, size_t, handle), (*priorities)(int *, int *), (*wait)(handle);

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static handle contexts[DEVICES], streams[DEVICES];
static uint64_t signals;

static void check(int failed, const char *what) {
  if (!failed) return;
  fprintf(stderr, "heap in GPU memory: %s failed with %d\n", what, failed);
  abort();
}

static void *function(void *library, const char *name) {
  void *found = dlsym(library, name);
  check(!found, name);
  return found;
}

static void load(void) {
  void *cuda = dlopen("libcuda.so.1", RTLD_NOW);
  check(!cuda, "libcuda.so.1");
  *(void **)&pointer_attribute = function(cuda, "cuPointerGetAttribute");
  *(void **)&retain = function(cuda, "cuDevicePrimaryCtxRetain");
  *(void **)&push = function(cuda, "cuCtxPushCurrent_v2");
  *(void **)&pop = function(cuda, "cuCtxPopCurrent_v2");
  *(void **)&priorities = function(cuda, "cuCtxGetStreamPriorityRange");
  *(void **)&create_stream = function(cuda, "cuStreamCreateWithPriority");
  *(void **)&read = function(cuda, "cuMemcpyDtoHAsync_v2");
  *(void **)&write64 = function(cuda, "cuStreamWriteValue64_v2");
  *(void **)&wait = function(cuda, "cuStreamSynchronize");
}

/* Push the device's context, and return its stream; the caller pops the context */
static handle stream_of(uint64_t address) {
  int device = 0, lowest, highest;
  check(pointer_attribute(&device, DEVICE_ORDINAL, address) || device < 0 || device >= DEVICES, "cuPointerGetAttribute");
  if (!contexts[device]) check(retain(&contexts[device], device), "cuDevicePrimaryCtxRetain");
  check(push(contexts[device]), "cuCtxPushCurrent");
  if (!streams[device]) { /* high priority: no hardware queue shared with waiting kernels */
    check(priorities(&lowest, &highest), "cuCtxGetStreamPriorityRange");
    check(create_stream(&streams[device], NON_BLOCKING, highest), "cuStreamCreateWithPriority");
  }
  return streams[device];
}

static void apply(const struct message *message) {
  int sets = message->operation == SIGNAL || message->operation == SIGNAL_SET || message->operation == SET;
  int adds = message->operation == SIGNAL_ADD || message->operation == ADD;
  check((!sets && !adds) || message->bytes != sizeof(uint64_t), "an atomic operation other than to set or add 8 bytes");
  pthread_mutex_lock(&lock);
  if (!wait) load();
  handle stream = stream_of(message->address), before;
  uint64_t value = message->value, old = 0;
  if (adds) {
    check(read(&old, message->address, sizeof old, stream) || wait(stream), "cuMemcpyDtoHAsync");
    value += old;
  }
  check(write64(stream, message->address, value, 0), "cuStreamWriteValue64");
  check(wait(stream), "cuStreamSynchronize");
  check(pop(&before), "cuCtxPopCurrent");
  signals++;
  pthread_mutex_unlock(&lock);
}

static void *ucx(const char *name) {
  static void *library; /* may be loaded in a local scope, which RTLD_NEXT does not search */
  if (!library) library = dlopen("libucp.so.0", RTLD_LAZY | RTLD_NOLOAD);
  return function(library ? library : RTLD_NEXT, name);
}

static void answered(void *request, int status, void *user_data) {
  (void)user_data;
  check(status, "an answer");
  ((void (*)(void *))ucx("ucp_request_free"))(request);
}

static int signal_came(void *argument, const void *header, size_t header_bytes, void *data, size_t bytes,
                       const struct received *received) {
  static const char answers[2] = {0, 1};
  typedef void *send(void *, unsigned, const void *, size_t, const void *, size_t, const struct send_param *);
  (void)argument, (void)header, (void)header_bytes;
  struct message message;
  check(bytes < sizeof message || !(received->has & HAS_REPLY_EP), "a message of NVSHMEM's");
  memcpy(&message, data, sizeof message);
  apply(&message);
  struct send_param param = {.mask = HAS_CALLBACK, .sent = answered};
  void *request = ((send *)ucx("ucp_am_send_nbx"))(received->reply_ep, ANSWER, &answers[message.is_proxys != 0], 1, NULL, 0,
                                                   &param);
  check((uintptr_t)request >= (uintptr_t)-100, "ucp_am_send_nbx");
  return 0;
}

int ucp_worker_set_am_recv_handler(void *worker, const struct handler *handler) {
  struct handler ours = *handler;
  if (ours.id == SEND) ours.came = signal_came;
  return ((int (*)(void *, const struct handler *))ucx("ucp_worker_set_am_recv_handler"))(worker, &ours);
}

/* Number of signals written by the driver */
uint64_t gpu_heap_signals(void) {
  pthread_mutex_lock(&lock);
  uint64_t found = signals;
  pthread_mutex_unlock(&lock);
  return found;
}
