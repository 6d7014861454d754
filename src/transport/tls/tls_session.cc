#include "transport/tls/tls_session.h"

#include "poseidon/options.h"

#ifdef POSEIDON_HAVE_OPENSSL

#include <openssl/crypto.h>
#include <openssl/err.h>
#include <openssl/ssl.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <string_view>
#include <utility>

#include "base/file_descriptor.h"
#include "transport/tls/tls_socket.h"

namespace poseidon {

namespace tls {
namespace {

using Outcome = Transfer::Outcome;

constexpr const char* kCipherSuite = "TLS_AES_128_GCM_SHA256";
constexpr std::array<unsigned char, 2> kCipherSuiteId{0x13, 0x01};
constexpr const char* kGroups = "X25519:P-256";
constexpr std::string_view kIdentity = "poseidon";  // the name of the key; both ends have only one key
constexpr std::size_t kRecordBytes = SSL3_RT_MAX_PLAIN_LENGTH;
// How many records leave in one system call. They fill a loopback packet and are few enough to stay in the cache.
constexpr int kRecordsPerBatch = 4;

struct FreeContext {
  void operator()(SSL_CTX* context) const { SSL_CTX_free(context); }
};
struct FreeSsl {
  void operator()(SSL* ssl) const { SSL_free(ssl); }
};
struct FreePsk {
  void operator()(SSL_SESSION* psk) const { SSL_SESSION_free(psk); }
};
using ContextPtr = std::unique_ptr<SSL_CTX, FreeContext>;
using SslPtr = std::unique_ptr<SSL, FreeSsl>;
using PskPtr = std::unique_ptr<SSL_SESSION, FreePsk>;

/// Returns the first error that OpenSSL reported on this thread.
std::string first_complaint() {
  const char* const reason = ERR_reason_error_string(ERR_get_error());
  return std::string("TLS: ") + (reason == nullptr ? "unknown error" : reason);
}

/// Returns the key that both ends know already, in the form that TLS uses. Returns null if there is no memory.
PskPtr psk_of(SSL* ssl, const Digest& key) {
  PskPtr psk(SSL_SESSION_new());
  const SSL_CIPHER* const cipher = SSL_CIPHER_find(ssl, kCipherSuiteId.data());
  const bool filled =
      psk && cipher != nullptr &&
      SSL_SESSION_set1_master_key(psk.get(), reinterpret_cast<const unsigned char*>(key.data()), key.size()) == 1 &&
      SSL_SESSION_set_cipher(psk.get(), cipher) == 1 &&
      SSL_SESSION_set_protocol_version(psk.get(), TLS1_3_VERSION) == 1;
  return filled ? std::move(psk) : nullptr;
}

/// Goes through the bytes of several pieces, one after the other.
class Cursor {
 public:
  explicit Cursor(std::span<const iovec> pieces) : pieces_(pieces) { skip_empty(); }

  bool at_end() const { return pieces_.empty(); }
  /// Returns what is left of the current piece.
  std::span<const std::byte> here() const {
    return std::span(static_cast<const std::byte*>(pieces_.front().iov_base), pieces_.front().iov_len)
        .subspan(offset_bytes_);
  }
  /// `bytes` must not be more than `here` has.
  void advance(std::size_t bytes) {
    offset_bytes_ += bytes;
    skip_empty();
  }

 private:
  void skip_empty() {
    while (!pieces_.empty() && offset_bytes_ == pieces_.front().iov_len) {
      pieces_ = pieces_.subspan(1);
      offset_bytes_ = 0;
    }
  }

  std::span<const iovec> pieces_;
  std::size_t offset_bytes_ = 0;
};

class Session final : public TlsSession {
 public:
  Session(std::shared_ptr<const TlsContext> context, SslPtr ssl, const Digest& key, int socket,
          std::uint64_t records_per_key)
      : context_(std::move(context)),
        socket_(socket),
        ssl_(std::move(ssl)),
        key_(key),
        records_per_key_(records_per_key) {}
  ~Session() override { forget_key(); }

  /// Returns false if there is no memory.
  bool start(wire::Handshake::Role role, const TlsSocketMethod& method) {
    BIO* const bio = method.new_bio(socket_);
    if (bio == nullptr) return false;
    SSL_set_bio(ssl_.get(), bio, bio);
    SSL_set_app_data(ssl_.get(), this);
    if (role == wire::Handshake::Role::acceptor) {
      SSL_set_accept_state(ssl_.get());
    } else {
      SSL_set_connect_state(ssl_.get());
      SSL_set_verify(ssl_.get(), SSL_VERIFY_PEER,
                     nullptr);  // a certificate would have to be trusted, and none is
    }
    return true;
  }

  Transfer shake_hands() override {
    const OneThread::Turn turn(one_thread_);
    ERR_clear_error();
    const int result = SSL_do_handshake(ssl_.get());
    Transfer outcome = result == 1 ? Transfer{} : reason_of(result);
    // The few bytes of a handshake always fit into a socket that has sent almost nothing.
    if (socket_.flush().outcome != Outcome::done && outcome.outcome != Outcome::failed)
      return fail(errno_text(socket_.error()));
    if (outcome.outcome != Outcome::done) return outcome;
    forget_key();
    if (SSL_session_reused(ssl_.get()) != 1) return fail("TLS: the peer has not used the key of the job");
    return outcome;
  }

  Transfer send(std::span<const iovec> pieces) override {
    const OneThread::Turn turn(one_thread_);
    Cursor cursor(pieces);
    std::size_t taken_bytes = 0;
    for (;;) {
      const Transfer flushed = socket_.flush();
      if (flushed.outcome == Outcome::failed) return fail(errno_text(socket_.error()));
      if (flushed.outcome == Outcome::blocked && taken_bytes == 0) return flushed;
      if (flushed.outcome == Outcome::blocked || cursor.at_end()) return {Outcome::done, taken_bytes};
      for (int record = 0; record < kRecordsPerBatch && !cursor.at_end(); ++record) {
        const std::size_t written = write_record(cursor);
        if (written == 0) return fail(first_complaint());
        taken_bytes += written;
      }
    }
  }

  bool has_unsent() const override {
    const OneThread::Turn turn(one_thread_);
    return socket_.has_unsent();
  }

  Transfer receive(std::span<const iovec> pieces) override {
    const OneThread::Turn turn(one_thread_);
    if (over_) return *over_;
    drained_ = false;
    std::size_t total_bytes = 0;
    for (const iovec& piece : pieces) {
      for (std::size_t at = 0; at < piece.iov_len;) {
        std::size_t got = 0;
        ERR_clear_error();
        const int result =
            SSL_read_ex(ssl_.get(), static_cast<std::byte*>(piece.iov_base) + at, piece.iov_len - at, &got);
        if (result != 1) return stop_receiving(reason_of(result), total_bytes);
        at += got;
        total_bytes += got;
      }
    }
    return {Outcome::done, total_bytes};
  }

  bool has_unread() const override {
    const OneThread::Turn turn(one_thread_);
    return !drained_ && (over_ || SSL_has_pending(ssl_.get()) == 1);
  }

  Transfer finish() override {
    const OneThread::Turn turn(one_thread_);
    if (!std::exchange(finished_, true)) {
      ERR_clear_error();
      SSL_shutdown(ssl_.get());  // if it cannot tell the peer any more, the peer finds out from the closed connection
    }
    return socket_.flush();
  }

  const std::string& failure() const override {
    const OneThread::Turn turn(one_thread_);
    return failure_;
  }

  /// See SSL_psk_use_session_cb_func.
  static int use_psk(SSL* ssl, const EVP_MD* /*hash*/, const unsigned char** identity, std::size_t* identity_bytes,
                     SSL_SESSION** psk) {
    *identity = reinterpret_cast<const unsigned char*>(kIdentity.data());
    *identity_bytes = kIdentity.size();
    *psk = psk_of(ssl, of(ssl).key_).release();
    return *psk != nullptr ? 1 : 0;
  }

  /// See SSL_psk_find_session_cb_func.
  static int find_psk(SSL* ssl, const unsigned char* identity, std::size_t identity_bytes, SSL_SESSION** psk) {
    const bool known = std::string_view(reinterpret_cast<const char*>(identity), identity_bytes) == kIdentity;
    *psk = known ? psk_of(ssl, of(ssl).key_).release() : nullptr;
    return *psk != nullptr || !known ? 1 : 0;
  }

 private:
  static const Session& of(SSL* ssl) { return *static_cast<const Session*>(SSL_get_app_data(ssl)); }

  void forget_key() { OPENSSL_cleanse(key_.data(), key_.size()); }

  Transfer fail(std::string why) {
    failure_ = std::move(why);
    return {Outcome::failed};
  }

  /// Returns why the OpenSSL call did not succeed.
  Transfer reason_of(int result) {
    switch (SSL_get_error(ssl_.get(), result)) {
      case SSL_ERROR_WANT_READ:
        return {Outcome::blocked};
      case SSL_ERROR_ZERO_RETURN:
        return {Outcome::ended};
      case SSL_ERROR_SYSCALL:
        return fail(errno_text(socket_.error()));
      default:
        if (!socket_.at_end()) return fail(first_complaint());
        return fail("closed without the end of TLS: the peer died, or the connection was cut");
    }
  }

  Transfer stop_receiving(Transfer why, std::size_t total_bytes) {
    drained_ = why.outcome == Outcome::blocked;
    if (!drained_) over_ = why;
    // Sends TLS's alert, which tells the peer what was wrong.
    if (why.outcome == Outcome::failed) static_cast<void>(socket_.flush());
    return total_bytes > 0 ? Transfer{Outcome::done, total_bytes} : why;
  }

  /// Writes the next record's bytes. They come from where they lie, or are copied together if the pieces are small.
  /// Returns the number of bytes; 0 means that there is nothing to write.
  std::size_t write_record(Cursor& cursor) {
    if (++records_ > records_per_key_) {
      records_ = 1;
      SSL_key_update(ssl_.get(), SSL_KEY_UPDATE_NOT_REQUESTED);
    }
    std::span<const std::byte> bytes = cursor.here().first(std::min(cursor.here().size(), kRecordBytes));
    cursor.advance(bytes.size());
    if (bytes.size() < kRecordBytes && !cursor.at_end()) {
      std::size_t gathered = bytes.size();
      std::ranges::copy(bytes, gathered_.begin());
      while (gathered < kRecordBytes && !cursor.at_end()) {
        const auto more = cursor.here().first(std::min(cursor.here().size(), kRecordBytes - gathered));
        std::memcpy(gathered_.data() + gathered, more.data(), more.size());
        gathered += more.size();
        cursor.advance(more.size());
      }
      bytes = std::span(gathered_).first(gathered);
    }
    std::size_t written = 0;
    ERR_clear_error();
    return SSL_write_ex(ssl_.get(), bytes.data(), bytes.size(), &written) == 1 ? written : 0;
  }

  const std::shared_ptr<const TlsContext> context_;  // like socket_, it must outlive the BIO in ssl_
  TlsSocket socket_;
  const SslPtr ssl_;
  Digest key_;  // needed until the handshake is over
  const std::uint64_t records_per_key_;
  std::uint64_t records_ = 0;  // how many records the current key has protected
  std::array<std::byte, kRecordBytes> gathered_{};
  bool drained_ = false;          // the socket had nothing more when it was last asked
  std::optional<Transfer> over_;  // set when nothing more can be received
  bool finished_ = false;
  std::string failure_;
  [[no_unique_address]] OneThread one_thread_{"TlsSession"};
};

class Context final : public TlsContext, public std::enable_shared_from_this<Context> {
 public:
  explicit Context(std::uint64_t records_per_key)
      : context_(SSL_CTX_new(TLS_method())), records_per_key_(records_per_key) {}

  /// Returns false if this OpenSSL lacks what is needed.
  bool configure() {
    SSL_CTX* const context = context_.get();
    if (context == nullptr || !method_) return false;
    // Only TLS 1.3 with the key that both ends know already is allowed, and with Diffie-Hellman. So data that somebody
    // records today stays secret even if the job's secret becomes known. There is no certificate, so an acceptor can do
    // nothing else.
    SSL_CTX_set_options(context, SSL_OP_NO_TICKET | SSL_OP_NO_RENEGOTIATION | SSL_OP_NO_COMPRESSION);
    SSL_CTX_set_session_cache_mode(context, SSL_SESS_CACHE_OFF);
    SSL_CTX_set_psk_use_session_callback(context, Session::use_psk);
    SSL_CTX_set_psk_find_session_callback(context, Session::find_psk);
    SSL_CTX_set_read_ahead(context, 1);  // so that a record takes one system call instead of two
    return SSL_CTX_set_min_proto_version(context, TLS1_3_VERSION) == 1 &&
           SSL_CTX_set_max_proto_version(context, TLS1_3_VERSION) == 1 &&
           SSL_CTX_set_ciphersuites(context, kCipherSuite) == 1 && SSL_CTX_set1_groups_list(context, kGroups) == 1 &&
           SSL_CTX_set_num_tickets(context, 0) == 1;
  }

  Result<std::unique_ptr<TlsSession>> open(wire::Handshake::Role role, const Digest& key, int socket) const override {
    ERR_clear_error();
    SslPtr ssl(SSL_new(context_.get()));
    if (!ssl) return Status(ErrorCode::aborted, first_complaint());
    auto session = std::make_unique<Session>(shared_from_this(), std::move(ssl), key, socket, records_per_key_);
    if (!session->start(role, method_)) return Status(ErrorCode::aborted, first_complaint());
    return std::unique_ptr<TlsSession>(std::move(session));
  }

 private:
  const TlsSocketMethod method_;
  const ContextPtr context_;
  const std::uint64_t records_per_key_;
};

}  // namespace
}  // namespace tls

bool tls_available() { return true; }

Result<std::shared_ptr<const TlsContext>> make_tls_context(std::uint64_t records_per_key) {
  ERR_clear_error();
  const auto context = std::make_shared<tls::Context>(records_per_key);
  if (!context->configure())
    return Status(ErrorCode::invalid_argument, "tls=on, but OpenSSL here cannot do TLS 1.3 with " +
                                                   std::string(tls::kCipherSuite) + " (" + tls::first_complaint() +
                                                   "); install OpenSSL 3");
  return std::shared_ptr<const TlsContext>(context);
}

}  // namespace poseidon

#else

namespace poseidon {

bool tls_available() { return false; }

Result<std::shared_ptr<const TlsContext>> make_tls_context(std::uint64_t /*records_per_key*/) {
  return Status(ErrorCode::invalid_argument,
                "tls=on, but this build has no OpenSSL; build it where OpenSSL 3 with its headers is installed "
                "(libssl-dev, openssl-devel)");
}

}  // namespace poseidon

#endif  // POSEIDON_HAVE_OPENSSL
