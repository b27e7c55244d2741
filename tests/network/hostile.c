/* A hostile network: a preloaded library between NVSHMEM's UCX transport and UCX, for tests without network cards.

   cc -O1 -shared -fPIC -o libhostile.so hostile.c -ldl -lpthread;  LD_PRELOAD=.../libhostile.so

   NVSHMEM's proxy thread sends a put with signal as a ucp_put_nbx, a ucp_worker_fence and an active message with the
   signal (ucp_am_send_nbx). Blocks send requests to the proxy one by one, so puts and signals of several blocks may
   interleave: put A, put B, signal A, signal B; no field pairs them. But once there are as many signals as puts, each
   put has its signal. The library holds such groups back, and ucp_worker_progress passes them on: in any order between
   groups; within a group first its puts, then its signals, both in any order. So no signal arrives before its own data.
   A group ends with a launch at the latest. The source of a put is read when the put is passed on.
   A signal without data passes at once, and so does a put of one value; an explicit nvshmem_fence() does not order groups.

   Further functions: ALLSCAN_UCX_TLS sets UCX's transports, which NVSHMEM would choose itself. The symmetric heap is
   declared to UCX as host memory, unless ALLSCAN_GPU_HEAP is set. ALLSCAN_NODE sets the node's name in gethostname(),
   uname() and the names of shared memory, so that processes of one host can be several nodes. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <sys/utsname.h>
#include <time.h>

/* The first fields of ucp_request_param_t, and its bits for fields that are set (ucp.h) */
typedef void (*callback)(void *request, int status, void *user_data);
struct param {
  uint32_t mask, flags;
  void *request;
  callback sent;
  uint64_t datatype;
  void *user_data, *reply_buffer;
  int memory_type;
  uint64_t rest[5];
};
enum { HAS_FLAGS = 16, HAS_CALLBACK = 2, HAS_USER_DATA = 4, HAS_MEMORY_TYPE = 64, HOST_MEMORY = 0, GPU_MEMORY = 1 };

/* The active message by which NVSHMEM's transport sends an atomic operation */
struct message {
  void *ep;
  uint64_t size, value, compare, return_flag;
  void *address, *return_address;
  int operation;
};
enum { SEND = 0, SIGNAL_ALONE = 8, SIGNAL_SET = 9, SIGNAL_ADD = 10, MOST_BYTES = 128 };

struct put {
  struct put *next;
  const void *from;
  size_t bytes;
  uint64_t to;
  void *rkey;
};
struct signal {
  struct signal *next;
  uint64_t number;
  unsigned id;
  uint32_t flags;
  size_t length;
  _Alignas(8) char message[MOST_BYTES];
};
struct group { /* puts and signals to one endpoint */
  struct group *next;
  void *ep;
  uint64_t oldest, bytes, num_puts, num_signals; /* oldest: number of its first signal, also its place in the order */
  int64_t since, due;
  int loses;
  struct put *puts;
  struct signal *signals;
};

enum { OPEN_NS = 50000000 };
enum mode { PASS, REORDER, BANDWIDTH, STALL, NEVER };
enum count { HELD, PASSED, OVERTAKINGS, LOST, BYTES, MOST_HELD, FAILED, OF_GROUPS, COUNTS };

static pthread_mutex_t lock;
static enum mode mode;
static uint64_t argument, numbers, state = 88172645463325252u, counts[COUNTS];
static int64_t last_due, tick_ns, ticked_ns;
static struct group *open_groups, *held_groups; /* open groups have fewer signals than puts */
static __thread int inside;
static int heap_memory = HOST_MEMORY;

static void *real(const char *name) {
  static void *ucp; /* may be loaded in a local scope, which RTLD_NEXT does not search */
  if (!ucp) ucp = dlopen("libucp.so.0", RTLD_LAZY | RTLD_NOLOAD);
  void *found = dlsym(ucp ? ucp : RTLD_NEXT, name);
  if (!found) {
    fprintf(stderr, "hostile network: UCX has no %s\n", name);
    abort();
  }
  return found;
}
#define REAL(result, name, ...)                       \
  static result (*call)(__VA_ARGS__);                 \
  if (!call) call = (result(*)(__VA_ARGS__))real(name)

static int64_t now(void) {
  if (tick_ns) return ticked_ns;
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1000000000ll + time.tv_nsec;
}

static uint64_t drawn(uint64_t below) {
  state ^= state << 13, state ^= state >> 7, state ^= state << 17;
  return below ? state % below : 0;
}

/* mode: see above; value: largest delay in ns (REORDER), bytes a second (BANDWIDTH), ns of stall from now on (STALL),
   else unused. A held group keeps the mode in which it was posted. */
void network_set(int new_mode, uint64_t value) {
  pthread_mutex_lock(&lock);
  mode = new_mode, argument = value;
  last_due = mode == STALL ? now() + (int64_t)value : 0;
  pthread_mutex_unlock(&lock);
}

/* From now on every ucp_worker_progress is ns of time, so that the order of delivery depends on the calls alone */
void network_tick(uint64_t ns) { tick_ns = (int64_t)ns; }

uint64_t network_now(void) { return (uint64_t)now(); }

void network_seed(uint64_t seed) { state = 88172645463325252u ^ (seed << 17 | seed); }

uint64_t network_count(int what) {
  fflush(NULL); /* also UCX's log, which names transports */
  pthread_mutex_lock(&lock);
  uint64_t found = what >= 0 && what < COUNTS ? counts[what] : 0;
  pthread_mutex_unlock(&lock);
  return found;
}

__attribute__((constructor)) static void begin(void) {
  static const char *const names[] = {"pass", "reorder", "bandwidth", "stall", "never"};
  pthread_mutexattr_t kind;
  pthread_mutexattr_init(&kind);
  pthread_mutexattr_settype(&kind, PTHREAD_MUTEX_RECURSIVE);
  pthread_mutex_init(&lock, &kind);
  if (getenv("ALLSCAN_GPU_HEAP")) heap_memory = GPU_MEMORY;
  const char *given = getenv("ALLSCAN_NETWORK"); /* for example reorder:2000000 */
  for (int i = 0; given && i < 5; i++) {
    size_t length = strlen(names[i]);
    if (!strncmp(given, names[i], length) && (!given[length] || given[length] == ':'))
      network_set(i, given[length] ? strtoull(given + length + 1, NULL, 10) : 0);
  }
}

static int failed(void *request) {
  if ((uintptr_t)request < (uintptr_t)-100) return 0;
  counts[FAILED]++;
  fprintf(stderr, "hostile network: UCX failed with %d\n", (int)(intptr_t)request);
  return 1;
}

/* Callback of a put or signal that was passed on; frees user_data, the signal */
static void sent(void *request, int status, void *user_data) {
  REAL(void, "ucp_request_free", void *);
  if (status) failed((void *)(intptr_t)status);
  free(user_data);
  call(request);
}

static void pass_put(const struct group *group, const struct put *put) {
  REAL(void *, "ucp_put_nbx", void *, const void *, size_t, uint64_t, void *, const struct param *);
  struct param param = {.mask = HAS_CALLBACK | HAS_MEMORY_TYPE, .sent = sent, .memory_type = heap_memory};
  if (!group->loses) failed(call(group->ep, put->from, put->bytes, put->to, put->rkey, &param));
}

static void pass_signal(const struct group *group, struct signal *signal) {
  REAL(void *, "ucp_am_send_nbx", void *, unsigned, const void *, size_t, const void *, size_t, const struct param *);
  if (group->loses) { /* NVSHMEM counts the answers: send a message without effect */
    struct message *message = (struct message *)signal->message;
    message->operation = SIGNAL_ADD, message->value = 0;
  }
  counts[group->loses ? LOST : PASSED]++;
  struct param param = {.mask = HAS_CALLBACK | HAS_USER_DATA | HAS_FLAGS, .flags = signal->flags, .sent = sent,
                        .user_data = signal};
  void *request = call(group->ep, signal->id, NULL, 0, signal->message, signal->length, &param);
  if (!request || failed(request)) free(signal);
}

static void pass_puts(struct group *group) {
  for (struct put *put = group->puts, *next; put; put = next) {
    next = put->next;
    pass_put(group, put);
    free(put);
  }
  group->puts = NULL;
}

/* Without a fence: on one UCX lane signals stay after earlier puts */
static void pass_on(struct group *group) {
  if (!group->loses) counts[BYTES] += group->bytes;
  group->bytes = 0;
  pass_puts(group);
  for (struct signal *signal = group->signals, *next; signal; signal = next) {
    next = signal->next;
    pass_signal(group, signal);
  }
  group->signals = NULL;
}

static void hold(struct group *group) {
  int64_t time = now();
  group->loses = mode == NEVER, group->due = time;
  if (mode == REORDER) group->due = time + (int64_t)drawn(argument);
  if (mode == BANDWIDTH)
    group->due = last_due = (last_due > time ? last_due : time) + (int64_t)(group->bytes * 1e9 / (argument + !argument));
  if (mode == STALL && last_due > time) group->due = last_due;
  group->next = held_groups, held_groups = group;
  counts[HELD] += group->num_signals;
  if (counts[HELD] > counts[MOST_HELD]) counts[MOST_HELD] = counts[HELD];
}

/* Pass on due groups, the earliest first. The caller has the lock. */
static void pass_due(void) {
  if (inside) return;
  inside = 1;
  for (int64_t time = now();;) {
    struct group **first = NULL;
    for (struct group **p = &held_groups; *p; p = &(*p)->next)
      if (!first || (*p)->due < (*first)->due || ((*p)->due == (*first)->due && (*p)->oldest < (*first)->oldest))
        first = p;
    if (!first || (*first)->due > time) break;
    struct group *group = *first;
    *first = group->next;
    counts[HELD] -= group->num_signals;
    uint64_t oldest = UINT64_MAX; /* of the groups still held */
    for (struct group *p = held_groups; p; p = p->next)
      if (p->ep == group->ep && p->oldest < oldest) oldest = p->oldest;
    for (struct signal *signal = group->signals; signal; signal = signal->next) {
      int overtakes = oldest < signal->number;
      counts[OF_GROUPS] += overtakes;
      for (struct signal *other = signal->next; other && !overtakes; other = other->next)
        overtakes = other->number < signal->number;
      counts[OVERTAKINGS] += overtakes;
    }
    pass_on(group);
    free(group);
  }
  /* A put without a signal, or several puts with one: pass on the parts so far; the group stays open */
  for (struct group *group = open_groups; group; group = group->next)
    if (now() - group->since > OPEN_NS) pass_on(group);
  inside = 0;
}

/* The link to the open group of an endpoint, or the end of the list */
static struct group **open_to(void *ep) {
  struct group **p = &open_groups;
  while (*p && (*p)->ep != ep) p = &(*p)->next;
  return p;
}

/* NVSHMEM declares its heap as GPU memory, and a single value as host memory */
static struct param of_heap(const struct param *param) {
  struct param own = *param;
  if (heap_memory == HOST_MEMORY) own.mask |= HAS_MEMORY_TYPE, own.memory_type = HOST_MEMORY;
  return own;
}

void *ucp_put_nbx(void *ep, const void *from, size_t bytes, uint64_t to, void *rkey, const struct param *param) {
  REAL(void *, "ucp_put_nbx", void *, const void *, size_t, uint64_t, void *, const struct param *);
  if (inside || mode == PASS || (param->mask & HAS_USER_DATA)) { /* user data: a barrier's single value */
    struct param own = of_heap(param);
    return call(ep, from, bytes, to, rkey, &own);
  }
  struct put *put = malloc(sizeof *put);
  pthread_mutex_lock(&lock);
  struct group **at = open_to(ep);
  if (!*at) {
    *at = calloc(1, sizeof **at);
    (*at)->ep = ep, (*at)->since = now();
  }
  struct put **p = &(*at)->puts;
  for (uint64_t behind = mode == REORDER ? drawn((*at)->num_puts + 1) : (*at)->num_puts; behind && *p; behind--)
    p = &(*p)->next;
  *put = (struct put){*p, from, bytes, to, rkey};
  *p = put;
  (*at)->num_puts++, (*at)->bytes += bytes;
  pthread_mutex_unlock(&lock);
  return NULL; /* complete for NVSHMEM, which polls in quiet only */
}

void *ucp_get_nbx(void *ep, void *to, size_t bytes, uint64_t from, void *rkey, const struct param *param) {
  REAL(void *, "ucp_get_nbx", void *, void *, size_t, uint64_t, void *, const struct param *);
  struct param own = of_heap(param);
  return call(ep, to, bytes, from, rkey, &own);
}

void *ucp_am_send_nbx(void *ep, unsigned id, const void *header, size_t header_length, const void *data, size_t length,
                      const struct param *param) {
  REAL(void *, "ucp_am_send_nbx", void *, unsigned, const void *, size_t, const void *, size_t, const struct param *);
  int held = 0;
  if (!inside && id == SEND && length >= sizeof(struct message) && length <= MOST_BYTES) {
    pthread_mutex_lock(&lock);
    struct group **at = open_to(ep), *group = *at;
    int operation = ((const struct message *)data)->operation;
    if (group && operation >= SIGNAL_ALONE && operation <= SIGNAL_ADD) {
      struct signal *signal = calloc(1, sizeof *signal), **p = &group->signals;
      for (uint64_t behind = mode == REORDER ? drawn(group->num_signals + 1) : group->num_signals; behind && *p; behind--)
        p = &(*p)->next;
      *signal = (struct signal){.next = *p, .number = ++numbers, .id = id, .flags = param->flags, .length = length};
      if (!group->num_signals) group->oldest = numbers;
      memcpy(signal->message, data, length);
      *p = signal;
      held = 1;
      if (++group->num_signals == group->num_puts) {
        *at = group->next;
        hold(group);
      }
    }
    pthread_mutex_unlock(&lock);
  }
  return held ? NULL : call(ep, id, header, header_length, data, length, param);
}

/* Held messages need no fence yet */
int ucp_worker_fence(void *worker) {
  REAL(int, "ucp_worker_fence", void *);
  pthread_mutex_lock(&lock);
  int holds = open_groups || held_groups;
  pthread_mutex_unlock(&lock);
  return holds ? 0 : call(worker);
}

unsigned ucp_worker_progress(void *worker) {
  REAL(unsigned, "ucp_worker_progress", void *);
  /* trylock, since UCX may call this with a lock of its own, for which the owner of our lock waits */
  if (!inside && !pthread_mutex_trylock(&lock)) {
    ticked_ns += tick_ns;
    pass_due();
    pthread_mutex_unlock(&lock);
  }
  return call(worker);
}

/* quiet: first passes on all held groups, when they are due, and the puts of open ones */
void *ucp_worker_flush_nbx(void *worker, const struct param *param) {
  REAL(void *, "ucp_worker_flush_nbx", void *, const struct param *);
  for (int holds = 1; holds;) {
    pthread_mutex_lock(&lock);
    pass_due();
    holds = held_groups != NULL;
    pthread_mutex_unlock(&lock);
    if (holds) ucp_worker_progress(worker);
  }
  pthread_mutex_lock(&lock);
  for (struct group *group = open_groups; group; group = group->next) pass_puts(group);
  pthread_mutex_unlock(&lock);
  return call(worker, param);
}

int ucp_config_modify(void *config, const char *name, const char *value) {
  REAL(int, "ucp_config_modify", void *, const char *, const char *);
  const char *transports = getenv("ALLSCAN_UCX_TLS");
  return call(config, name, transports && !strcmp(name, "TLS") ? transports : value);
}

/* Names of nodes */

int gethostname(char *name, size_t size) {
  struct utsname found;
  if (uname(&found)) return -1;
  if (size) strncpy(name, found.nodename, size - 1), name[size - 1] = 0;
  return 0;
}

int uname(struct utsname *found) {
  static int (*call)(struct utsname *);
  if (!call) call = (int (*)(struct utsname *))dlsym(RTLD_NEXT, "uname");
  int result = call(found);
  const char *node = getenv("ALLSCAN_NODE");
  if (!result && node) strncpy(found->nodename, node, sizeof found->nodename - 1);
  return result;
}

/* /name becomes /node-name: NVSHMEM's name of a heap in host memory is fixed */
static const char *of_node(const char *name, char *made, size_t size) {
  const char *node = getenv("ALLSCAN_NODE");
  if (!node) return name;
  snprintf(made, size, "/%s-%s", node, name + (*name == '/'));
  return made;
}

int shm_open(const char *name, int flags, mode_t permissions) {
  static int (*call)(const char *, int, mode_t);
  if (!call) call = (int (*)(const char *, int, mode_t))dlsym(RTLD_NEXT, "shm_open");
  char made[256];
  return call(of_node(name, made, sizeof made), flags, permissions);
}

int shm_unlink(const char *name) {
  static int (*call)(const char *);
  if (!call) call = (int (*)(const char *))dlsym(RTLD_NEXT, "shm_unlink");
  char made[256];
  return call(of_node(name, made, sizeof made));
}
