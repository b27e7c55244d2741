/* NVSHMEM's proxy for ranks without GPUs: sends puts with signals over UCX like NVSHMEM's UCX transport (see hostile.c).

   cc -shared -fPIC -I.../libucx/include -o libproxy.so proxy.c .../libucp.so.0 .../libucs.so.0 -lpthread

   A rank calls proxy_put_signal. Requests of up to SIDE_BY_SIDE such calls interleave, like those of a GPU's blocks.
   One thread sends the requests, makes progress, and applies arriving signals. */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucp/api/ucp.h>
#include <unistd.h>

enum { RANKS = 64, SIDE_BY_SIDE = 4, SEND = 0, ANSWER = 1, SIGNAL_SET = 9, SIGNAL_ADD = 10, ADDRESS = 1024, KEY = 256 };

struct message {
  void *ep;
  uint64_t size, value, compare, return_flag;
  void *address, *return_address;
  int operation;
  _Alignas(8) char flags[4];
};
struct place { /* a rank's addresses, for its peers */
  uint64_t base, address_bytes, key_bytes;
  char address[ADDRESS], key[KEY];
};
struct call {
  struct call *next;
  const void *from;
  uint64_t bytes, to, signal, value;
  int peer, steps;
  struct message message;
};

static ucp_context_h context;
static ucp_worker_h worker;
static ucp_ep_h endpoints[RANKS];
static ucp_rkey_h keys[RANKS];
static uint64_t bases[RANKS], answers_awaited, asked, done;
static struct call *calls, **last = &calls;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_t thread;
static volatile int ends, wants_quiet, is_quiet;
static unsigned seed;

static void check(int status, const char *what) {
  if (status) {
    fprintf(stderr, "proxy: %s failed with %d\n", what, status);
    abort();
  }
}
static void check_request(ucs_status_ptr_t request) { check(UCS_PTR_IS_ERR(request) ? UCS_PTR_STATUS(request) : 0, "UCX"); }
static void sent(void *request, ucs_status_t status, void *user_data) {
  (void)user_data;
  check(status, "sending");
  ucp_request_free(request);
}

static ucs_status_t signal_came(void *argument, const void *header, size_t header_bytes, void *data, size_t bytes,
                                const ucp_am_recv_param_t *param) {
  static char nothing;
  struct message message;
  (void)argument, (void)header, (void)header_bytes;
  check(bytes != sizeof message, "a message");
  memcpy(&message, data, sizeof message);
  volatile uint64_t *word = message.address;
  *word = message.operation == SIGNAL_ADD ? *word + message.value : message.value;
  ucp_request_param_t answer = {.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK, .cb.send = sent};
  check_request(ucp_am_send_nbx(param->reply_ep, ANSWER, &nothing, 1, NULL, 0, &answer));
  return UCS_OK;
}
static ucs_status_t answer_came(void *argument, const void *header, size_t header_bytes, void *data, size_t bytes,
                                const ucp_am_recv_param_t *param) {
  (void)argument, (void)header, (void)header_bytes, (void)data, (void)bytes, (void)param;
  answers_awaited--;
  return UCS_OK;
}

static void put(struct call *call) {
  ucp_request_param_t param = {.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_MEMORY_TYPE, .cb.send = sent,
                               .memory_type = UCS_MEMORY_TYPE_CUDA}; /* as declared by NVSHMEM */
  check_request(ucp_put_nbx(endpoints[call->peer], call->from, call->bytes, bases[call->peer] + call->to, keys[call->peer],
                            &param));
}
static void send_signal(struct call *call) {
  struct message *message = malloc(sizeof *message); /* NVSHMEM has a pool */
  *message = (struct message){.size = 8, .value = call->value, .operation = SIGNAL_SET};
  message->address = (void *)(bases[call->peer] + call->signal);
  ucp_request_param_t param = {.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_FLAGS, .cb.send = sent,
                               .flags = UCP_AM_SEND_FLAG_REPLY | UCP_AM_SEND_FLAG_EAGER};
  ucs_status_ptr_t request = ucp_am_send_nbx(endpoints[call->peer], SEND, NULL, 0, message, sizeof *message, &param);
  check_request(request);
  answers_awaited++;
  if (!request) free(message); /* else leaked: tests are short */
}

static void step(void) {
  pthread_mutex_lock(&lock);
  struct call **at = &calls;
  for (unsigned behind = rand_r(&seed) % SIDE_BY_SIDE; behind && *at && (*at)->next; behind--) at = &(*at)->next;
  struct call *call = *at;
  if (call && call->steps == 2) {
    *at = call->next;
    if (!call->next) last = at;
  }
  pthread_mutex_unlock(&lock);
  if (!call) return;
  int now = call->steps++;
  if (now == 0) put(call);
  if (now == 1) check(ucp_worker_fence(worker), "fence");
  if (now == 2) {
    send_signal(call);
    free(call);
    __atomic_add_fetch(&done, 1, __ATOMIC_SEQ_CST);
  }
}

static void quiet(void) {
  while (answers_awaited) ucp_worker_progress(worker);
  ucp_request_param_t param = {.op_attr_mask = 0};
  ucs_status_ptr_t request = ucp_worker_flush_nbx(worker, &param);
  check_request(request);
  if (request) {
    while (ucp_request_check_status(request) == UCS_INPROGRESS) ucp_worker_progress(worker);
    ucp_request_free(request);
  }
}

static void *run(void *nothing) {
  while (!ends) {
    step();
    if (!ucp_worker_progress(worker)) usleep(20);
    if (wants_quiet && __atomic_load_n(&done, __ATOMIC_SEQ_CST) == __atomic_load_n(&asked, __ATOMIC_SEQ_CST)) {
      quiet();
      wants_quiet = 0, is_quiet = 1;
    }
  }
  return nothing;
}

/* Register this rank's memory; fill place for its peers */
void proxy_open(void *memory, uint64_t bytes, unsigned number, struct place *place) {
  ucp_config_t *config;
  check(ucp_config_read(NULL, NULL, &config), "config");
  check(ucp_config_modify(config, "TLS", "posix"), "config");
  check(ucp_config_modify(config, "ZCOPY_THRESH", "0"), "config");
  ucp_params_t params = {.field_mask = UCP_PARAM_FIELD_FEATURES, .features = UCP_FEATURE_RMA | UCP_FEATURE_AM};
  check(ucp_init(&params, config, &context), "init");
  ucp_worker_params_t kind = {.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE, .thread_mode = UCS_THREAD_MODE_MULTI};
  check(ucp_worker_create(context, &kind, &worker), "worker");
  ucp_am_handler_param_t handler = {.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB};
  handler.id = SEND, handler.cb = signal_came;
  check(ucp_worker_set_am_recv_handler(worker, &handler), "handler");
  handler.id = ANSWER, handler.cb = answer_came;
  check(ucp_worker_set_am_recv_handler(worker, &handler), "handler");
  ucp_mem_map_params_t map = {.field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH,
                              .address = memory, .length = bytes};
  ucp_mem_h handle;
  check(ucp_mem_map(context, &map, &handle), "mem_map");
  void *key;
  ucp_address_t *address;
  check(ucp_rkey_pack(context, handle, &key, &place->key_bytes), "rkey_pack");
  check(ucp_worker_get_address(worker, &address, &place->address_bytes), "get_address");
  check(place->key_bytes > KEY || place->address_bytes > ADDRESS, "a place");
  memcpy(place->key, key, place->key_bytes);
  memcpy(place->address, address, place->address_bytes);
  place->base = (uint64_t)memory;
  seed = number;
}

void proxy_connect(const struct place *places, int size) {
  for (int peer = 0; peer < size && peer < RANKS; peer++) {
    ucp_ep_params_t params = {.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS,
                              .address = (const ucp_address_t *)places[peer].address};
    check(ucp_ep_create(worker, &params, &endpoints[peer]), "ep_create");
    check(ucp_ep_rkey_unpack(endpoints[peer], places[peer].key, &keys[peer]), "rkey_unpack");
    bases[peer] = places[peer].base;
  }
  check(pthread_create(&thread, NULL, run, NULL), "thread");
}

/* to, signal: offsets in the peer's memory */
void proxy_put_signal(uint64_t to, const void *from, uint64_t bytes, uint64_t signal, uint64_t value, int peer) {
  struct call *call = calloc(1, sizeof *call);
  *call = (struct call){.from = from, .bytes = bytes, .to = to, .signal = signal, .value = value, .peer = peer};
  pthread_mutex_lock(&lock);
  *last = call, last = &call->next;
  __atomic_add_fetch(&asked, 1, __ATOMIC_SEQ_CST);
  pthread_mutex_unlock(&lock);
}

void proxy_quiet(void) {
  is_quiet = 0, wants_quiet = 1;
  while (!is_quiet) usleep(50);
}

void proxy_end(void) {
  ends = 1;
  pthread_join(thread, NULL);
}
