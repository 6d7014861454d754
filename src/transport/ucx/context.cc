#ifdef POSEIDON_HAVE_UCX

#include "transport/ucx/context.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <iterator>
#include <string_view>

namespace poseidon::ucx {

namespace {

using Config = std::unique_ptr<ucp_config_t, decltype(&::ucp_config_release)>;

/// A server that starts again on its port must not wait until old connections time out.
const UcxSettings kDefaults{{"CM_REUSEADDR", "y"}};

/// Settings with this prefix apply only to media of RDMA devices.
constexpr const char* kRdmaPrefix = "IB_";

Status modify(ucp_config_t& config, const UcxSettings& settings) {
  for (const auto& [name, value] : settings) {
    const ucs_status_t status = ::ucp_config_modify(&config, name.c_str(), value.c_str());
    if (status == UCS_OK) continue;
    return {ErrorCode::invalid_argument, "UCX rejects the setting " + name + "=" + value + ": " + text_of(status) +
                                             "; use transport=auto, or see docs/ucx.md"};
  }
  return {};
}

/// Opens a context with exactly these settings.
Result<std::shared_ptr<const Context>> open_with(const UcxSettings& settings) {
  ucp_config_t* read = nullptr;
  if (const ucs_status_t status = ::ucp_config_read(nullptr, nullptr, &read); status != UCS_OK) {
    return Status(ErrorCode::invalid_argument, "UCX cannot read its environment variables: " + text_of(status) +
                                                   "; check those that begin with UCX_");
  }
  const Config config(read, &::ucp_config_release);
  if (Status status = modify(*config, kDefaults); !status.ok()) return status;
  if (Status status = modify(*config, settings); !status.ok()) return status;
  ucp_params_t params{};
  params.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_MT_WORKERS_SHARED;
  params.features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP;
  params.mt_workers_shared = 1;
  ucp_context_h context = nullptr;
  if (const ucs_status_t status = ::ucp_init(&params, config.get(), &context); status != UCS_OK) {
    return Status(ErrorCode::invalid_argument,
                  "UCX cannot be set up: " + text_of(status) + "; use transport=auto, or see docs/ucx.md");
  }
  return std::shared_ptr<const Context>(std::make_shared<Context>(context));
}

}  // namespace

std::string text_of(ucs_status_t status) { return ::ucs_status_string(status); }

Result<std::shared_ptr<const Context>> Context::open(const UcxSettings& settings) {
  auto context = open_with(settings);
  UcxSettings others;
  std::ranges::copy_if(settings, std::back_inserter(others),
                       [](const auto& setting) { return !setting.first.starts_with(kRdmaPrefix); });
  if (others.size() == settings.size() || !context.ok() || context.value()->has_rdma()) return context;
  // Settings of RDMA devices are left out here. UCX would warn of settings that nothing uses, for each engine anew.
  return open_with(others);
}

bool Context::has_rdma() const {
  // UCX tells it only in this text, with a line for each medium and device: "… rc_mlx5/mlx5_0:1".
  char* text = nullptr;
  std::size_t size = 0;
  FILE* stream = ::open_memstream(&text, &size);
  if (stream == nullptr) return true;
  ::ucp_context_print_info(context_, stream);
  static_cast<void>(std::fclose(stream));  // NOLINT(cppcoreguidelines-owning-memory)
  const std::unique_ptr<char, decltype(&::free)> owner(text, &::free);
  const std::string_view description(text, size);
  return std::ranges::any_of(std::array{" rc_", " dc_", " ud_"}, [&description](const char* medium) {
    return description.find(medium) != std::string_view::npos;
  });
}

}  // namespace poseidon::ucx

#endif  // POSEIDON_HAVE_UCX
